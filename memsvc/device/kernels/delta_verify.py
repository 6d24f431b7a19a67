"""The gated delta net over verify blocks, two launches a layer: rows are replayed from the ring, then come the block's.

The first brings all rows together (delta_rows), the second takes them to the states (delta_states).
"""

# pyright: reportCallIssue=false

import torch

from memsvc.device.kernels.delta_memory import DeltaMemory
from memsvc.device.kernels.delta_rows import bring_rows
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from memsvc.device.kernels.delta_states import LEAST, verify_states
from memsvc.device.kernels.launch import cut, padded
from memsvc.device.kernels.places import BlockRows

FEW, MANY = DeltaTile(64, 4), DeltaTile(128, 4)
FEW_HEADS = 48
"""FEW up to so many heads of all places together. All that columns of a head have in common is made once a part: more
parts are done sooner, fewer cost less."""


def choose_tile(num_heads: int) -> DeltaTile:
    """For heads of all places together."""
    return FEW if num_heads <= FEW_HEADS else MANY


def chunk_sizes(memory: DeltaMemory, block_size: int) -> dict[str, int]:
    """Rows of chunks, as powers of two: ROWS behind the last page edge, WRITTEN up to it, and NEW ones of a block."""
    page = memory.page_size
    passed = (memory.ring.num_rows - block_size) // page * page
    return {"ROWS": _rows(page - 1 + block_size), "WRITTEN": _rows(passed), "NEW": _rows(block_size)}


def _rows(num: int) -> int:
    return max(LEAST.value, padded(num))


def delta_verify(raw: torch.Tensor, gates: torch.Tensor, rows: BlockRows, site: DeltaSite) -> torch.Tensor:
    """Outputs [N * B, v_heads, v_dim] float32 of the blocks' rows; zeros for slots that are done.

    raw [N * B, conv_dim] of the model's dtype and gates [N * B, 2, v_heads] float32 may be strided. Tables stay as
    they are: see move_states.
    """
    memory, conv, size = site.memory, site.conv, rows.block_size
    form, heads, channels = memory.state, memory.state.num_heads, memory.state.conv_dim
    expected = (rows.num_rows, channels), (rows.num_rows, 2, heads), (form.conv_rows + 1, channels)
    if (raw.shape, gates.shape, conv.shape) != expected or raw.dtype != form.dtype:
        raise ValueError(
            f"raw {list(raw.shape)} {raw.dtype}, gates {list(gates.shape)} and conv {list(conv.shape)} do not go with "
            f"{rows.num_rows} rows and {form}"
        )
    assert raw.stride(1) == gates.stride(2) == 1, f"strides {raw.stride()} of raw, {gates.stride()} of gates"
    assert conv.is_contiguous(), f"strides {conv.stride()} of conv"
    at_hand = bring_rows(raw, gates, rows, site)
    out = torch.empty((rows.num_rows, heads, form.v_dim), dtype=torch.float32, device=raw.device)
    tile = site.tile or choose_tile(heads * len(rows.members))
    columns, k_pad = max(LEAST.value, min(tile.columns, padded(form.v_dim))), max(LEAST.value, padded(form.k_dim))
    parts = cut(form.v_dim, columns)
    # Products are fused with sums here: half of all instructions, and no other code rounds as this does.
    verify_states[heads * parts, len(rows.members)](
        at_hand.q, at_hand.kv, at_hand.decay, at_hand.beta, at_hand.noted, out, memory.recurrent,
        memory.recurrent.stride(0), form.k_dim**-0.5, B=size, HEADS=heads, GROUP=heads // memory.num_k_heads,
        K_DIM=form.k_dim, K_PAD=k_pad, V_DIM=form.v_dim, MOST=at_hand.most, COLS=columns, PARTS=parts,
        PIECE=min(tile.piece, k_pad), PRECISION=tile.precision or ("tf32" if raw.dtype.itemsize < 4 else "tf32x3"),
        **chunk_sizes(memory, size), num_warps=tile.num_warps, num_stages=1, maxnreg=tile.registers,
    )  # fmt: skip
    return out
