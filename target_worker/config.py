"""What the target worker is told at start. No torch here: launch imports this file."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """Made once by launch, written as JSON into the run directory."""

    run_dir: str
    """Directory of the sockets, mode 0700."""
    model_path: str
    """Hugging Face folder of the target."""
    engine: str = "main"
    """Name under which target and draft register with the memory service."""
    dtype: str = "auto"
    """auto (the checkpoint's), bfloat16 or float32; weights and KV alike."""
    device: str = "cpu"
    """Torch device of weights and arena."""
    load_format: str = "auto"
    """auto reads safetensors, dummy makes random weights."""
    page_size: int = 16
    """Tokens in a page of a token kind."""
    max_running_requests: int = 32
    """Requests that hold memory at once; the others wait."""
    max_prefill_tokens: int = 512
    """Most prompt tokens computed in one step, decode rows included."""
    context_len: int = 8192
    """Longest prompt plus answer in tokens."""
    draft: bool = False
    """A draft worker is started beside this one."""
    num_draft_tokens: int = 0
    """k: most drafts verified per request and step. 0 = plain decode."""
    widths: tuple[int, ...] = ()
    """Numbers of drafts of which one is chosen for each step, 0 among them. Empty: always num_draft_tokens."""
    target_layer_ids: tuple[int, ...] = ()
    """Layers whose outputs are the draft's features, in its order."""
    simulate_accept_length: float = 0.0
    """Load tests: force this mean accept length, bonus token included. 0 = off. The text is meaningless."""
    num_threads: int = 0
    """Torch threads. 0 = torch's own choice."""
    spec_trace: int = 0
    """1 or 2 log a line of host times per step (device times need a CUDA device). 0 = off."""
    log_level: str = "INFO"
    """Level of the process log."""

    @property
    def block_size(self) -> int:
        """B: most rows of a verify block, the anchor included."""
        return 1 + self.num_draft_tokens

    @property
    def max_step_rows(self) -> int:
        """Rows of the largest forward; as many feature rows fit into the exchange."""
        return max(self.max_prefill_tokens, self.max_running_requests * self.block_size)
