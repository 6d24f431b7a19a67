"""Memory of gated delta nets as models have it, all slots in use: for what compiles or times kernels."""

import random

import torch

from memsvc.device.kernels.delta_memory import DeltaMemory, DeltaTables
from memsvc.device.kernels.places import BlockRows
from memsvc.device.ring_pool import RingShape
from memsvc.device.state_pool import StateShape
from memsvc.wire.mem import KindLayout
from target_worker.model.linear_spec import RING_PAGES, LinearSpec, ring_page_rows

PAGE, BLOCK = 16, 9
MODELS = {
    "27b": LinearSpec(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, conv_kernel=4),
    "tiny-hybrid": LinearSpec(num_k_heads=4, num_v_heads=4, k_dim=64, v_dim=64, conv_kernel=4),
}
MEAN_ACCEPTED = 4
"""Rows that a step moves a length by, about: where lengths stand after the last page edge."""


def shapes_of(spec: LinearSpec, block_size: int = BLOCK) -> tuple[StateShape, RingShape]:
    """bfloat16"""
    state = StateShape(
        num_heads=spec.num_v_heads, k_dim=spec.k_dim, v_dim=spec.v_dim, conv_rows=spec.conv_kernel - 1,
        conv_dim=spec.conv_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    ring = RingShape(
        page_rows=ring_page_rows(PAGE, block_size), num_pages=RING_PAGES, num_heads=spec.num_v_heads,
        conv_dim=spec.conv_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    return state, ring


def memory_of(spec: LinearSpec, num_slots: int, num_layers: int, device: str, block_size: int = BLOCK) -> DeltaMemory:
    """Zeros, but for page 0. The states of all slots stand at PAGE."""
    state, ring = shapes_of(spec, block_size)
    num, stride = num_slots * num_layers, -(-max(state.page_bytes, ring.page_bytes) // 256) * 256
    state_kind, ring_kind = (
        KindLayout(
            name=name, page_bytes=shape.page_bytes, tokens_per_page=0, pages_per_req=num_layers, window=0,
            pages_per_frame=1, stride_bytes=stride, num_pages=1 + num * (1 + RING_PAGES),
        )
        for name, shape in (("state", state), ("ring", ring))
    )  # fmt: skip
    arena = torch.zeros(state_kind.num_pages * stride, dtype=torch.uint8, device=device)
    pages = torch.arange(1, 1 + num * (1 + RING_PAGES), dtype=torch.int32, device=device)

    def table(part: torch.Tensor, *form: int) -> torch.Tensor:
        """With slot 0 in front."""
        return torch.cat((torch.zeros(1, *form, dtype=torch.int32, device=device), part.view(num_slots, *form)))

    state_in = table(pages[:num], num_layers)
    tables = DeltaTables(
        state_in=state_in, state_out=state_in.clone(), ring=table(pages[num:], num_layers, RING_PAGES),
        state_len=torch.full((num_slots + 1,), PAGE, dtype=torch.int32, device=device),
    )  # fmt: skip
    return DeltaMemory(arena, (state_kind, state), (ring_kind, ring), tables, page_size=PAGE)


def steady_rows(num_slots: int, device: str, block_size: int = BLOCK) -> BlockRows:
    """A place for each slot, with lengths as they are in the middle of long answers."""
    dice = random.Random(num_slots)
    lengths = [0] + [PAGE + dice.randrange(PAGE + MEAN_ACCEPTED) for _ in range(num_slots)]
    return BlockRows(
        members=torch.arange(1, num_slots + 1, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        done=torch.zeros(num_slots + 1, dtype=torch.int32, device=device),
        block_size=block_size,
    )


def inputs_of(spec: LinearSpec, num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """raw and gates, views as the projection and DeltaLayer.mix make them."""
    width = spec.conv_dim + spec.value_size + 2 * spec.gate_width
    raw = torch.randn(num_rows, width, device=device).to(torch.bfloat16)[:, : spec.conv_dim]
    g, beta = -torch.rand(2, num_rows, spec.gate_width, device=device)
    return raw, torch.stack((g, -beta), dim=1)[..., : spec.num_v_heads]


def step_bytes(spec: LinearSpec, rows: BlockRows) -> int:
    """What a layer's launch cannot do without: states read, and written at edges; rows replayed, read and kept."""
    num_slots, replayed = len(rows.members), int((rows.lengths[1:] - PAGE).sum())
    passed = int((rows.lengths[1:] >= 2 * PAGE).sum())
    keys, before = spec.num_k_heads * spec.k_dim, spec.conv_kernel - 1
    old_row = (spec.conv_dim - keys) * 2 + 2 * spec.num_v_heads * 4
    new_row = 2 * (spec.conv_dim * 2 + 2 * spec.num_v_heads * 4) + spec.value_size * 4
    return (
        (num_slots + passed) * spec.value_size * spec.k_dim * 4
        + num_slots * before * spec.conv_dim * 2
        + replayed * old_row
        + rows.num_rows * new_row
    )
