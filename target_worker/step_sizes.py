"""Rows of the target's largest step, and how many of them leave features. launch sizes the exchange with it. No torch."""

from dataclasses import dataclass

from memsvc.device.buckets import bucket_sizes, most_places


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """What a step may hold, from the few settings that decide it.

    On the CPU blocks and prompt chunks share max_prefill_tokens rows. On a CUDA device chunks run beside the blocks,
    which stand first and are padded to a bucket.
    """

    is_cuda: bool
    max_running_requests: int
    """Blocks at most."""
    block_size: int
    """Rows of a block, the anchor included."""
    max_prefill_tokens: int
    """Prompt tokens of a step, at most."""
    cuda_graph_max_bs: int
    """Largest batch that is captured."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batches that are captured on a CUDA device."""
        return bucket_sizes(self.cuda_graph_max_bs, self.max_running_requests)

    @property
    def max_places(self) -> int:
        """Blocks of the largest batch, padding included."""
        if not self.is_cuda:
            return self.max_running_requests
        return most_places(self.cuda_graph_max_bs, self.max_running_requests)

    @property
    def feature_rows(self) -> int:
        """Rows of features in the exchange."""
        block_rows = self.max_places * self.block_size
        return block_rows + self.max_prefill_tokens if self.is_cuda else max(self.max_prefill_tokens, block_rows)

    @property
    def max_req_rows(self) -> int:
        """Rows that one request may have in a step."""
        return max(self.max_prefill_tokens, self.block_size) if self.is_cuda else self.feature_rows

    def chunk_tokens(self, num_block_rows: int) -> int:
        """Prompt tokens that a step may compute beside blocks of so many rows; below 1 means none."""
        return self.max_prefill_tokens if self.is_cuda else self.feature_rows - num_block_rows
