"""One step on the device: forward of all rows, accept rule, and what follows for each request's lengths."""

from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import PageId, ReqId
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows, Req, state_reach
from target_worker.runner import Runner, Segment
from target_worker.trace import StepTrace
from target_worker.verify import VerifyRow, verify_blocks


class Executor:
    """Runs plans. Changes computed_len, pending features and the sampler of the requests, not their tokens."""

    def __init__(self, runner: Runner, simulate_accept_length: float = 0.0) -> None:
        self._runner = runner
        self._simulate = simulate_accept_length
        self._eos_ids = runner.model.shape.eos_ids

    def run(
        self, plan: StepPlan, drafts: dict[ReqId, list[int]], clear: list[PageId], trace: StepTrace
    ) -> dict[Req, list[int]]:
        """The tokens each request emits: of every decoding one, and of those whose prompt is complete now.

        drafts may lack requests (no draft for them); clear names pages to zero first.
        """
        if clear:
            self._runner.pool.zero_pages(clear)
        segments: list[Segment] = []
        rows: dict[Req, VerifyRow] = {}
        for req in plan.decode:
            block = [req.tokens[-1], *drafts.get(req.rid, [])]
            segments.append(Segment(req.row, req.computed_len, block, len(block), _state_len(req), num_certain=1))
            rows[req] = VerifyRow(self._sampler(req), block[1:])
        for req, num in plan.chunks.items():
            chunk = req.tokens[req.computed_len : req.computed_len + num]
            is_last = num == req.extend_len
            num_certain = state_reach(num, is_last=is_last)
            segments.append(Segment(req.row, req.computed_len, chunk, int(is_last), _state_len(req), num_certain))
            if is_last:
                rows[req] = VerifyRow(self._sampler(req), ())
        logits = self._runner.forward(segments, plan.feature_row)
        trace.mark("verify")
        emitted = dict(zip(rows, verify_blocks(logits, list(rows.values()), self._simulate), strict=True))
        self._advance(plan, segments, emitted)
        trace.mark("accept")
        return emitted

    def catch_up(self, reqs: list[Req]) -> None:
        """Bring the states of requests of a hybrid target to the last page edge of what is computed."""
        segments = [Segment(req.row, req.computed_len, [], 0, _state_len(req)) for req in reqs]
        self._runner.catch_up(segments)
        for req, segment in zip(reqs, segments, strict=True):
            self._note_state(req, segment)

    def _note_state(self, req: Req, segment: Segment) -> None:
        """The forward has written the state if its rows passed a page edge for certain."""
        linear, length = self._runner.linear, segment.write_len(self._runner.pool.page_size)
        if req.state is not None and linear is not None and length > req.state.length:
            linear.table.wrote(req.row)
            req.state.length = length

    def stops(self, req: Req, token: int) -> bool:
        """token ends the answer of req."""
        return token in self._sampler(req).stop_ids

    def _advance(self, plan: StepPlan, segments: list[Segment], emitted: dict[Req, list[int]]) -> None:
        first = plan.feature_row
        for req, segment in zip(plan.reqs(), segments, strict=True):
            # Of a block, the anchor and the accepted drafts are final: as many rows as it emits tokens.
            num = plan.chunks.get(req) or len(emitted[req])
            if self._runner.tap_layers:
                req.draft.pending.append(FeatureRows(req.computed_len, num, first))
            self._note_state(req, segment)
            req.computed_len += num
            first += len(segment.token_ids)

    def _sampler(self, req: Req) -> RowSampler:
        return req.sampler_of(self._eos_ids)


def _state_len(req: Req) -> int:
    return req.state.length if req.state is not None else 0
