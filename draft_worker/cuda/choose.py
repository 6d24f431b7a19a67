"""From logits to drafts in the slots: the best candidates of each row, and the walk over them."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from draft_worker.model import DraftModel
from draft_worker.propose import UNARY_TOP_K
from memsvc.device.graphs import Places
from memsvc.device.kernels.select_walk import SelectorTables, select_walk
from memsvc.device.kernels.top_k import top_k
from memsvc.device.slots import SlotState


@triton.jit
def _limit(num_drafts, members, most):
    member = tl.load(members + tl.program_id(0))
    tl.store(num_drafts + member, tl.minimum(tl.load(num_drafts + member), tl.load(most)))


def limit_drafts(slots: SlotState, members: torch.Tensor, most: torch.Tensor) -> None:
    """No more than most int32 [1] of the drafts in the members' slots count."""
    kernel: Any = _limit
    kernel[(len(members),)](slots.num_drafts, members, most, num_warps=1)


class TokenChoice:
    """The token choice of one drafter: draft_worker.choice with every request's own parameters, on the device."""

    def __init__(self, model: DraftModel, slots: SlotState, num_drafts: int) -> None:
        shape = model.shape
        self._model = model
        self._slots = slots
        self._num_drafts = num_drafts
        self._top_k = shape.selector_top_k if shape.has_selector else min(UNARY_TOP_K, len(model.head))
        ids = model.draft_to_target
        self._token_ids = None if ids is None else ids.to(torch.int32)

    def choose(self, places: Places, z: torch.Tensor, logits: torch.Tensor) -> None:
        """Drafts of all places into their slots. z [N * k, H] final-normed rows, logits [N * k, draft V].

        places.numbers [1]: how many drafts shall count.
        """
        shape, k = self._model.shape, self._top_k
        unary, head_rows = top_k(logits, k, shape.output_multiplier, shape.final_logit_softcapping)
        ids = head_rows if self._token_ids is None else self._token_ids[head_rows]
        form = (places.size, self._num_drafts, k)
        select_walk(unary.view(form), ids.view(form), places.members, self._slots, self._tables(z, form))
        limit_drafts(self._slots, places.members, places.numbers)

    def _tables(self, z: torch.Tensor, form: tuple[int, int, int]) -> SelectorTables | None:
        selector = self._model.selector
        if selector is None:
            return None
        hidden = F.linear(z, selector.hidden_projection).view(*form[:2], -1)
        return SelectorTables(hidden, selector.predecessor, selector.successor)
