"""Whether a Plan can be carried out, decided before anything changes. What the device alone knows is not asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_worker.checks import Limits
from draft_worker.cuda.slot_tables import SlotTables, missing_page
from memsvc.wire.spec import Plan

LAST_NUMBER = (1 << 31) - 1
"""Hand-over words are compared as signed differences."""


@dataclass(slots=True)
class PlanCheck:
    """Walks through one Plan in the order of its effects, on a copy of what they touch."""

    limits: Limits
    tables: SlotTables
    last_number: int
    """Of the Plan before, or of the greeting."""
    msg: Plan
    _open: set[int] = field(default_factory=set)
    """Slots as closes and opens leave them."""
    _pages: dict[int, np.ndarray] = field(default_factory=dict)

    def run(self) -> None:
        """Raise ValueError, with the numbers, if any part cannot be carried out."""
        self._numbers()
        self._columns()
        self._slots()
        self._page_entries()
        self._writes()
        self._members()

    def _numbers(self) -> None:
        msg = self.msg
        if not self.last_number < msg.number <= LAST_NUMBER:
            raise ValueError(f"plan {msg.number} is not in ({self.last_number}, {LAST_NUMBER}]")
        if not 0 <= msg.after <= LAST_NUMBER:
            raise ValueError(f"plan {msg.number} is to wait for {msg.after}, outside [0, {LAST_NUMBER}]")
        if not 0 <= msg.num_drafts <= self.limits.max_drafts:
            raise ValueError(f"num_drafts is {msg.num_drafts}, this draft gives at most {self.limits.max_drafts}")

    def _columns(self) -> None:
        msg = self.msg
        groups = {
            "page_slots, page_idxs, page_ids": (msg.page_slots, msg.page_idxs, msg.page_ids),
            "write_slots, write_starts, write_lens, write_rows": (
                msg.write_slots, msg.write_starts, msg.write_lens, msg.write_rows,
            ),
        }  # fmt: skip
        for names, columns in groups.items():
            lengths = [len(column) for column in columns]
            if len(set(lengths)) > 1:
                raise ValueError(f"{names} have {lengths} entries")

    def _slots(self) -> None:
        host = self.tables.host
        self._open = set(self.tables.open_slots)
        for slot in self.msg.closes:
            if slot not in self._open:
                raise ValueError(f"close of slot {slot}, which is not open")
            self._open.remove(slot)
        for opened in self.msg.opens:
            if not 1 <= opened.slot <= host.max_reqs:
                raise ValueError(f"open of slot {opened.slot}, outside [1, {host.max_reqs}]")
            if opened.slot in self._open:
                raise ValueError(f"open of slot {opened.slot}, which is open already")
            if len(opened.pages) > host.max_pages:
                raise ValueError(f"open of slot {opened.slot}: {len(opened.pages)} pages, a row holds {host.max_pages}")
            self._check_ids(opened.pages)
            row = np.zeros(host.max_pages, dtype=np.int32)
            row[: len(opened.pages)] = opened.pages
            self._pages[opened.slot] = row
            self._open.add(opened.slot)

    def _check_ids(self, pages: Sequence[int], least: int = 0) -> None:
        """Ids are real pages, or 0 where least is 0."""
        limits = self.limits
        for page in pages:
            if not limits.first_page <= page < limits.num_pages and (page or least):
                raise ValueError(f"page id {page} is outside [{limits.first_page}, {limits.num_pages})")

    def _row(self, slot: int, what: str) -> np.ndarray:
        if slot not in self._open:
            raise ValueError(f"{what} of slot {slot}, which is not open")
        return self._pages[slot] if slot in self._pages else self.tables.pages(slot)

    def _page_entries(self) -> None:
        msg, max_pages = self.msg, self.tables.host.max_pages
        self._check_ids(msg.page_ids)
        self._check_ids(msg.clear_pages, least=1)
        for slot, idx, page in zip(msg.page_slots, msg.page_idxs, msg.page_ids, strict=True):
            row = self._row(slot, "page")
            if not 0 <= idx < max_pages:
                raise ValueError(f"page index {idx} of slot {slot} is outside [0, {max_pages})")
            if slot not in self._pages:
                self._pages[slot] = row = row.copy()
            row[idx] = page

    def _writes(self) -> None:
        msg, num_rows, page_size = self.msg, self.limits.num_rows, self.tables.host.page_size
        for slot, start, num, first in zip(
            msg.write_slots, msg.write_starts, msg.write_lens, msg.write_rows, strict=True
        ):  # fmt: skip
            row = self._row(slot, "features")
            if start < 0 or num < 0 or first < 0 or first + num > num_rows:
                raise ValueError(
                    f"features of slot {slot} at {start} in rows [{first}, {first + num}), the exchange has {num_rows}"
                )
            missing = missing_page(row, start, start + num, page_size)
            if num and missing is not None:
                raise ValueError(f"slot {slot}: tokens [{start}, {start + num}) need pages, none at index {missing}")

    def _members(self) -> None:
        members = self.msg.members
        if len(set(members)) != len(members):
            raise ValueError(f"{len(members)} members, {len(set(members))} slots")
        for slot in members:
            if slot not in self._open:
                raise ValueError(f"member slot {slot} is not open")
