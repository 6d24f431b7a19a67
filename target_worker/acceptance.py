"""How often drafts are accepted, place by place: a running estimate over the newest blocks. No torch here."""

MEMORY_BLOCKS = 512
"""A block counts for 1 / e of a new one after so many."""
PLAIN_STEPS = 64
"""While nothing is drafted, it fades with steps, so many to 1 / e,"""
LEAST_BLOCKS = 32.0
"""down to the weight of this many blocks, which a few probes outweigh."""
PRIOR_RATE = 0.7
"""Share of first drafts accepted, before any was verified."""
PRIOR_BLOCKS = 4.0
"""Weight of what is expected of a place beside what was seen there."""


class Acceptance:
    """For each place j of a block, the share a_j of drafts accepted there, all before them having been accepted.

    A place about which little is known is expected to be as good as the one before it: conditional rates of a
    drafter are nearly flat. All requests are pooled; what is old fades, tried again or not.
    """

    def __init__(self, max_drafts: int) -> None:
        self._trials = [0.0] * max_drafts
        self._hits = [0.0] * max_drafts

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """A block of num_drafts drafts was verified. One that ended its request says nothing certain: leave it out."""
        keep = 1 - 1 / MEMORY_BLOCKS
        for place in range(len(self._trials)):
            self._trials[place] = self._trials[place] * keep + (place <= num_accepted and place < num_drafts)
            self._hits[place] = self._hits[place] * keep + (place < num_accepted)

    def fade(self) -> None:
        """A step drafted nothing: what is known grows old."""
        for place, trials in enumerate(self._trials):
            if trials > LEAST_BLOCKS:
                keep = max(1 - 1 / PLAIN_STEPS, LEAST_BLOCKS / trials)
                self._trials[place] *= keep
                self._hits[place] *= keep

    def tokens(self, num_drafts: int) -> float:
        """Tokens expected of a block of so many drafts: 1 + a_1 + a_1 a_2 + .. + a_1 .. a_k.

        Equation 1 of Leviathan et al. (arXiv:2211.17192) with a rate for each place instead of one for all.
        """
        total, reached, rate = 1.0, 1.0, PRIOR_RATE
        for place in range(num_drafts):
            rate = (self._hits[place] + PRIOR_BLOCKS * rate) / (self._trials[place] + PRIOR_BLOCKS)
            reached *= rate
            total += reached
        return total
