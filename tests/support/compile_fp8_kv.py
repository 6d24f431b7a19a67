"""`python -m tests.support.compile_fp8_kv`: compiles the kernels that read and write e4m3 pages for Hopper.

At the sizes of the 8B model. Fails if one of them spills, takes too much shared memory, or neither reads nor writes
e4m3 as it should; names them otherwise. A process of its own, in which kernels are not interpreted. Needs no GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import torch

from memsvc.device.kernels.attention_tiles import AttentionScratch
from memsvc.device.kernels.block_attention import Context, block_attention
from memsvc.device.kernels.context_write import ContextRows, ContextSpec, write_block_kv, write_context_kv
from memsvc.device.kernels.heads import rotate_heads_into_pages
from memsvc.device.kernels.prefill_attention import PrefillPlan, prefill_attention
from memsvc.device.layers import RMSNorm
from tests.support import head_rows as rig
from tests.support.compiled_kernel import SHARED_BYTES, registers_and_stack
from tests.support.kernel_compiler import Compiled, compile_only

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 2


class Span:
    """A prompt of 64 tokens."""

    table_row, start, num, first = 1, 0, 64, 0


def launch_all() -> None:
    """Every kernel once, over pages in 8 bits and rows in bfloat16."""
    pool = rig.poisoned_pool(LAYERS, KV_HEADS, DIM, E4M3, "cpu")
    rows, bf16 = rig.block_rows("cpu", 4), torch.bfloat16
    assert rows.page_table is not None
    num, places = rows.num_rows, len(rows.members)
    q = torch.zeros(places, 4, HEADS, DIM, dtype=bf16)
    k = v = torch.zeros(places, 4, KV_HEADS, DIM, dtype=bf16)
    context = Context(rows.page_table, rows.members, torch.zeros_like(rows.lengths), rows.lengths)
    scratch = AttentionScratch.for_buckets([places], 4, (HEADS, KV_HEADS), DIM, "cpu")
    pages = pool.k(1), pool.v(1)
    block_attention(q, k, v, *pages, context, causal=True, window=0, scratch=scratch)
    plan = PrefillPlan.of([Span], HEADS // KV_HEADS, "cpu")
    prefill_attention(q.view(-1, HEADS, DIM)[:1].expand(64, -1, -1).contiguous(), pages, rows.page_table, plan)
    spec = rig.head_spec(rig.rotary_of(DIM, "cpu"), (HEADS, KV_HEADS, DIM), bf16)
    rotate_heads_into_pages(torch.zeros(num, (HEADS + 2 * KV_HEADS) * DIM, dtype=bf16), rows, spec, pages)
    write_block_kv(k.flatten(0, 1), v.flatten(0, 1), *pages, rows)
    norm = RMSNorm(torch.ones(LAYERS, 1, DIM, dtype=bf16), rig.EPS)
    counts = ContextRows(
        members=rows.members, num_rows=rows.lengths, block_size=4, page_table=rows.page_table, ends=rows.lengths
    )
    raw = torch.zeros(num, LAYERS, 2, KV_HEADS, DIM, dtype=bf16)
    write_context_kv(raw, ContextSpec(k_norm=norm, rotary=spec.rotary), pool, counts)


def faults(kernel: Compiled) -> list[str]:
    """What is wrong with it."""
    narrows, widens = "satfinite.e4m3x2" in kernel.ptx, "f16x2.e4m3x2" in kernel.ptx
    if not kernel.name.startswith("_attend"):
        # Clamped before: the conversion's own cutting off is not relied on. (The stack of two of them is cos' and sin's.)
        return [] if narrows and "min.NaN" in kernel.ptx else ["pages are not written as they should be"]
    _, spilled = registers_and_stack(kernel.cubin)
    found = []
    if spilled or kernel.shared_bytes > SHARED_BYTES:
        found.append(f"{spilled} bytes spilled, {kernel.shared_bytes} shared")
    # Pages come by copies that threads do not wait for.
    if narrows or not widens or "cp.async.cg.shared.global" not in kernel.ptx:
        found.append("pages are not read as they should be")
    return found


def main() -> None:
    """Compile all of them."""
    with compile_only() as kernels:
        launch_all()
    for kernel in kernels:
        assert not (wrong := faults(kernel)), (kernel.name, wrong)
        print(kernel.name, flush=True)


if __name__ == "__main__":
    main()
