"""What computes the gated delta rule of prompts on a device, stood in for by torch, with checks of what it is given."""

from itertools import pairwise

import torch

from memsvc.device.fla_delta import CHUNK
from memsvc.device.flashinfer_delta import BLOCK, HEAD_DIM
from memsvc.device.gated_delta import DeltaRows, gated_delta_rule
from target_worker.model.linear_spec import LinearSpec


def as_fla(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
           cu_seqlens=None, chunk_indices=None):  # fmt: skip
    """chunk_gated_delta_rule by its documentation: g in log space, states [N, HV, K, V], sequences [1, T, ..]."""
    assert use_qk_l2norm_in_kernel
    assert output_final_state
    assert scale == q.shape[-1] ** -0.5
    cuts, outs, ends = cu_seqlens.tolist(), [], []
    rows = DeltaRows(q.float(), k.float(), v.float(), g, beta)
    for place, (first, end) in enumerate(pairwise(cuts)):
        out, kept = gated_delta_rule(rows.part(first, end), initial_state[place : place + 1].clone(), [end - first], 0)
        outs.append(out)
        ends.append(kept.states)
    assert chunk_indices.tolist() == [
        [i, j] for i, (a, b) in enumerate(pairwise(cuts)) for j in range(-(-(b - a) // CHUNK))
    ]
    return torch.cat(outs, dim=1), torch.cat(ends)


def check_strides(x: torch.Tensor, *shape: int) -> None:
    assert x.shape == shape
    assert sum(stride == 1 for stride in x.stride()) == 1, f"strides {x.stride()}: one step is of one number"


class FakeLibrary:
    """FlashInfer's seven functions, by gated_delta_rule. The parts before the last note what they were given."""

    def __init__(self, spec: LinearSpec, num_sms: int) -> None:
        self.called: list[str] = []
        self.num_sms = num_sms
        self.num_k, self.num_v = spec.num_k_heads, spec.num_v_heads
        self.heads = (self.num_k, self.num_k, self.num_v, self.num_v)

    def _compute(self, q, k, v, out, alpha, beta, after, state, ends, scale):
        num_k, num_v = self.num_k, self.num_v
        assert len(q) > 1, "the step from row to row would be lost"
        assert scale == HEAD_DIM**-0.5
        num_rows = ends[-1]
        assert k.stride(0) == v.stride(0) == out.stride(0) == q.stride(1) == 1
        q, k, v = (x[:num_rows].float() for x in (q.permute(0, 2, 1), k.permute(1, 2, 0), v.permute(1, 2, 0)))
        for x in (q, k):
            assert x.shape[1] == num_k
            assert float((x.norm(dim=-1) - 1).abs().max()) < 5e-3
        form = (-1, num_v, HEAD_DIM, HEAD_DIM)
        alpha, beta = (x.view(-1, num_v)[:num_rows] for x in (alpha, beta))
        rows = DeltaRows(*(x[None] for x in (q, k, v, alpha.log(), beta)))
        for place, (first, end) in enumerate(pairwise(ends.tolist())):
            start = state.view(form)[place : place + 1].transpose(2, 3).clone()
            found, kept = gated_delta_rule(rows.part(first, end), start, [end - first], 0)
            out.permute(1, 2, 0)[first:end] = found[0].bfloat16()
            after.view(form)[place] = kept.states[0].transpose(1, 2)

    def whole_bf16(self, q, k, v, out, alpha, beta, after, state, no, none, tensormaps, ends, scale, *sizes):
        self.called.append("whole")
        assert (no, none) == (None, None)
        assert len(tensormaps) == self.num_sms * 128
        num = len(ends) - 1
        assert sizes == (*self.heads, num, 1, 0, num * self.num_v)
        self._compute(q, k, v, out, alpha, beta, after, state, ends, scale)

    def parts_t_bf16(self, k, beta, inverse, ends, num_k, num_heads, num_blocks, most, num):
        self.called.append("t")
        check_strides(k, HEAD_DIM, len(beta) // self.num_v, self.num_k)
        assert len(inverse) == num_blocks * num_heads * BLOCK**2
        assert (num_k, num_heads, num) == (self.num_k, self.num_v, len(ends) - 1)
        lens = ends.diff().tolist()
        # A sequence's pieces begin at the place that its first row and its number give.
        begins = [min(i, e) + (e - min(i, e)) // BLOCK for i, e in enumerate(ends.tolist())]
        assert all(b + -(-n // BLOCK) <= num_blocks for b, n in zip(begins[:-1], lens, strict=True))
        assert most == -(-max(lens) // BLOCK)
        self.beta, self.inverse = beta, inverse

    def parts_mn_bf16(self, k, v, inverse, alpha, moves, gains, ends, size, *sizes):
        self.called.append("mn")
        assert inverse.data_ptr() == self.inverse.data_ptr()
        check_strides(inverse, BLOCK, BLOCK, self.num_v, len(self.inverse) // (self.num_v * BLOCK**2))
        *heads, num_pieces, most, num = sizes
        lens = ends.diff().tolist()
        assert (tuple(heads), num) == (self.heads[1:], len(lens))
        assert most == -(-max(lens) // size)
        assert sum(-(-n // size) for n in lens) <= num_pieces
        assert len(moves) == len(gains) == num_pieces * self.num_v * HEAD_DIM**2
        self.moves, self.gains, self.num_pieces, self.most, self.size = moves, gains, num_pieces, most, size

    def parts_fix_few(self, *operands):
        self._fix("fix few", *operands)

    def parts_fix_some(self, *operands):
        self._fix("fix some", *operands)

    def parts_fix_many(self, *operands):
        self._fix("fix many", *operands)

    def _fix(self, name, moves, gains, state, starts, ends, *sizes):
        self.called.append(name)
        for x, given in ((moves, self.moves), (gains, self.gains)):
            assert x.data_ptr() == given.data_ptr()
            check_strides(x, HEAD_DIM, HEAD_DIM, self.num_v, self.num_pieces)
        assert sizes == (self.size, self.num_pieces, len(ends) - 1, self.num_v)
        self.starts = starts

    def parts_out_bf16(self, q, k, v, inverse, out, alpha, after, starts, state, tensormaps, ends, scale, *sizes):
        self.called.append("out")
        assert inverse.data_ptr() == self.inverse.data_ptr()
        assert starts.data_ptr() == self.starts.data_ptr()
        assert sizes == (*self.heads, self.size, self.num_pieces, self.most, len(ends) - 1)
        self._compute(q, k, v, out, alpha, self.beta, after, state, ends, scale)
