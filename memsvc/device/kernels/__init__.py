"""Triton kernels that target and draft share: what happens to rows between their GEMMs, attention, token choice.

They hold no policy and no state. Each takes tensors on a CUDA device, launches once on the current stream, reads
nothing on the host and may be captured in a CUDA graph; lengths, members and page tables are device tensors. With
TRITON_INTERPRET=1, set before triton is imported, numpy runs them on CPU tensors. Block shapes and warps are in a
table at the top of each module. Import the module you need: this package imports none, and so not triton either.

Rows of a bucket lie place by place, B rows each: row r is row r % B of place r // B, whose slot is members[r // B].
"""
