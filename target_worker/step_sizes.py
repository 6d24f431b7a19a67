"""Rows of the target's largest step, and how many of them leave features. launch sizes the exchange with it. No torch."""

from dataclasses import dataclass

from memsvc.device.buckets import bucket_sizes, most_places

PROMPT_BUCKETS = (32, 64, 128, 192, 256, 384, 512)
"""Prompt rows of the steps that are captured. The device computes more for longer than the host takes to enqueue them.

Rows up to some 150 take the device as long as reading the weights, so few are padded to much; more to a third at most.
"""
MOST_PROMPTS = 32
"""Prompts of a captured step, at most."""
_ROWS_EACH = 4
"""A bucket has room for a prompt in so many rows."""
CAPTURED_BACKENDS = ("auto", "triton")
"""Values of --attention-backend with which prompts are captured. The others plan on the host."""


def prompt_buckets(max_prefill_tokens: int, attention_backend: str) -> tuple[int, ...]:
    """Prompt rows to capture for a dense target, ascending; none has more than a step may have."""
    if attention_backend not in CAPTURED_BACKENDS:
        return ()
    last = min(PROMPT_BUCKETS[-1], max_prefill_tokens)
    return (*[size for size in PROMPT_BUCKETS if size < last], last)


def prompts_of(num_rows: int, max_running_requests: int) -> int:
    """Prompts that a bucket of so many rows has room for."""
    return min(MOST_PROMPTS, max_running_requests, max(1, num_rows // _ROWS_EACH))


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
