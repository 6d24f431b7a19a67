"""The best tokens of each row of logits, ties broken by the lowest id."""

from dataclasses import dataclass

import torch

GROUP = 64
"""Neighbouring tokens whose maximum is taken first; a power of two."""

_PLACE_BITS = 32


@dataclass(frozen=True, slots=True)
class CandidateFinder:
    """Finds the k best tokens of rows over a vocabulary, by (logit descending, id ascending).

    The k best tokens lie in the k best groups of neighbours, groups ordered by (maximum descending,
    place ascending): every group before the token's own holds a token that comes before it. So one
    pass takes maxima and two selections run over few numbers. On a CPU that is several times faster
    than torch.topk, and unlike it exact about ties.
    """

    multiplier: float = 1.0
    softcap: float = 0.0
    """Logits count as c * tanh(multiplier * x / c), or multiplier * x if the cap c is 0."""

    def top(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(values fp32, token ids int64), each [m, k] in order, of logits [vocab, m]. k <= vocab."""
        vocab_size = len(logits)
        maxima = self._scaled(_group_maxima(logits).t())
        best = _first_best(maxima, min(k, maxima.shape[1])).sort(dim=1).values
        ids = (best[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)).flatten(1)
        past_end = ids >= vocab_size
        near = self._scaled(logits.t().gather(1, ids.masked_fill(past_end, 0))).masked_fill_(past_end, -torch.inf)
        places = _first_best(near, k)
        return near.gather(1, places), ids.gather(1, places)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy in fp32 with multiplier and softcap."""
        wide = logits.float() * self.multiplier
        return wide.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else wide


def _group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """[groups, m] of logits [vocab, m]; the last group may be short."""
    vocab_size, m = logits.shape
    num_whole = vocab_size // GROUP
    whole = logits[: num_whole * GROUP].view(num_whole, GROUP, m)
    # Halving runs over long contiguous pieces: a fifth of the time of amax over the middle dimension.
    while whole.shape[1] > 1:
        half = whole.shape[1] // 2
        whole = torch.maximum(whole[:, :half], whole[:, half:])
    if num_whole * GROUP == vocab_size:
        return whole[:, 0]
    return torch.cat([whole[:, 0], logits[num_whole * GROUP :].amax(0, keepdim=True)])


def _first_best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places int64 [m, k] of the k largest of values fp32 [m, w], in order; the first of equal ones wins.

    Each number becomes an integer whose order is (value, earlier place first), so no two are equal.
    """
    bits = (values + 0.0).contiguous().view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.to(torch.int64).bitwise_left_shift_(_PLACE_BITS)
    keys |= torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    best = keys.topk(k, dim=1).values
    return values.shape[1] - 1 - (best & ((1 << _PLACE_BITS) - 1))
