"""The requests that the target has opened here, and what each Propose does to them."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from draft_worker.batch import BlockBatch
from draft_worker.features import FeatureWrites
from memsvc.device.page_table import PageTables
from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import ReqId, unpack_tokens
from memsvc.wire.spec import DraftOpen, Propose


@dataclass(slots=True, eq=False)
class DraftReq:
    """One open request. Draft KV of [valid_from, context_len) is there."""

    rid: ReqId
    row: int
    """In the page tables."""
    valid_from: int
    context_len: int
    sampler: RowSampler
    """Stands after the newest token this worker knows."""
    last_token: int


class Requests:
    """All open requests with their page tables. Changes by whole Proposes, which must have been checked before."""

    def __init__(self, tables: PageTables, eos_ids: Collection[int]) -> None:
        self.tables = tables
        self._eos_ids = eos_ids
        self._open: dict[ReqId, DraftReq] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, rid: ReqId) -> bool:
        return rid in self._open

    def __getitem__(self, rid: ReqId) -> DraftReq:
        return self._open[rid]

    def drop_all(self) -> int:
        """Forget every request; returns how many there were."""
        num = len(self._open)
        for rid in list(self._open):
            self._close(rid)
        return num

    def update(self, msg: Propose) -> None:
        """Close, open, set pages: everything of msg up to its writes."""
        for rid in msg.closes:
            self._close(rid)
        for opened in msg.opens:
            self._add(opened)
        self.tables.set_many(msg.page_rids, msg.page_idxs, msg.page_ids)

    def _close(self, rid: ReqId) -> None:
        del self._open[rid]
        self.tables.remove(rid)

    def _add(self, msg: DraftOpen) -> None:
        tokens = unpack_tokens(msg.tokens)
        prompt, output = tokens[: msg.prompt_len], tokens[msg.prompt_len :]
        row = self.tables.add(msg.rid)
        self.tables.set_row(msg.rid, msg.pages)
        self._open[msg.rid] = DraftReq(
            rid=msg.rid,
            row=row,
            valid_from=msg.valid_from,
            context_len=msg.context_len,
            sampler=RowSampler(msg.sampling, eos_ids=self._eos_ids, prompt=prompt, output=output),
            last_token=tokens[-1],
        )

    def writes(self, msg: Propose) -> FeatureWrites:
        """The feature runs of msg; the requests count them as written from now on."""
        reqs = [self._open[rid] for rid in msg.write_rids]
        for req, num in zip(reqs, msg.write_lens, strict=True):
            req.context_len += num
        return FeatureWrites(
            rows=np.array([req.row for req in reqs], dtype=np.int64),
            starts=np.array(msg.write_starts, dtype=np.int64),
            lens=np.array(msg.write_lens, dtype=np.int64),
            first=np.array(msg.write_rows, dtype=np.int64),
        )

    def blocks(self, msg: Propose) -> tuple[BlockBatch, list[RowSampler]]:
        """The blocks of msg and their samplers, after msg's new tokens."""
        reqs = [self._open[rid] for rid in msg.rids]
        for req, packed in zip(reqs, msg.new_tokens, strict=True):
            for token in unpack_tokens(packed):
                req.sampler.push(token)
                req.last_token = token
        batch = BlockBatch(
            rows=np.array([req.row for req in reqs], dtype=np.int64),
            anchors=np.array(msg.anchors, dtype=np.int64),
            anchor_pos=np.array(msg.anchor_pos, dtype=np.int64),
            context_start=np.array([req.valid_from for req in reqs], dtype=np.int64),
            num_drafts=msg.num_drafts,
        )
        return batch, [req.sampler for req in reqs]
