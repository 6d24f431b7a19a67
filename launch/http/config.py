"""What the front is told at start. No web framework here: the supervisor imports this file."""

from dataclasses import dataclass

from launch.plan import MemoryPlan

API_KEY_ENV = "MEMSVC_API_KEY"
"""The key reaches the front in its environment: arguments and files are easier to read by mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontConfig:
    """Made once by launch, written as JSON into the run directory."""

    run_dir: str
    """Directory of the sockets, mode 0700."""
    model_path: str
    """Folder of the target, told to clients as `root`."""
    served_model_names: tuple[str, ...]
    """Names that requests may use; the first one is the model's id."""
    context_len: int
    """Longest prompt plus answer in tokens."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """TCP port to listen on; 0 takes a free one."""
    listen_fd: int = -1
    """A socket that listens already, handed down by the supervisor; -1 makes one for host and port."""
    requires_key: bool = False
    """Whether every route but /health asks for the key in MEMSVC_API_KEY."""
    generation: int = 1
    """Counts the starts of the front in one run, so that no two fronts use the same request id."""
    needs: tuple[str, ...] = ("memsvc", "target", "tokenizer")
    """Roles without which no request can be served."""
    max_running_requests: int = 32
    """Requests that hold memory at once."""
    max_queued_requests: int = 1024
    """Requests that may wait beside them; past that a request is answered 429."""
    max_journal_bytes: int = 256 << 20
    """Prompts and answers kept for a restart of another process; past that 429 as well."""
    max_body_bytes: int = 8 << 20
    """Longest request body."""
    max_head_bytes: int = 64 << 10
    """Longest request line with headers."""
    max_connections: int = 2048
    """Open TCP connections; one more is answered 503 and closed."""
    max_choices: int = 64
    """Choices in one answer: prompts times n."""
    drain_s: float = 5.0
    """At a stop, how long running answers may go on."""
    page_size: int = 16
    """Tokens in a page of a token kind."""
    draft_model_path: str = ""
    """Folder of the draft model, empty without speculation."""
    block_size: int = 1
    """B: most rows of a verify block, the anchor included. 1 = no speculation."""
    widths: tuple[int, ...] = ()
    """Numbers of drafts that the target chooses from; empty if always B - 1 are drafted."""
    propose_route: str = "paged"
    """How the draft worker attends to its context."""
    plan: MemoryPlan | None = None
    """The memory plan, told to clients by /server_info."""
    launch_command: tuple[str, ...] = ()
    """The command as it was typed, keys left out."""
    log_level: str = "INFO"
    """Level of the process log."""

    @property
    def model_name(self) -> str:
        """The model's id."""
        return self.served_model_names[0]

    @property
    def max_live_requests(self) -> int:
        """Choices that may run or wait at once."""
        return self.max_running_requests + self.max_queued_requests

    @property
    def num_draft_tokens(self) -> int:
        """k: drafts verified per request and step."""
        return self.block_size - 1
