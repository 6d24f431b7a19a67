"""What the one command was asked to do, after all flags are read."""

from dataclasses import dataclass

from draft_worker.config import ROUTES
from launch.silence import LOOK_S, SILENT_LOOKS
from memsvc.config import LOG_LEVELS
from memsvc.core.config import EVICTION_POLICIES

DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("cpu",)
NO_SPECULATION = "NONE"
ALGORITHMS = ("DFLASH", NO_SPECULATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Defaults are the flags' defaults. Raises ValueError that names the flag, the limit and the value."""

    model_path: str = ""
    """Hugging Face folder of the target; empty serves SmolLM2-135M-Instruct, fetched once."""
    served_model_name: tuple[str, ...] = ()
    """Names on the API; empty takes the folder's name."""
    draft_model_path: str = ""
    """Folder of the drafter; empty takes the one that lies with the model, if there is one."""
    speculative_algorithm: str = ""
    """DFLASH, which is also what a drafter alone asks for; NONE serves without speculation."""
    block_size: int = 0
    """B: rows of a verify block, the anchor and B - 1 drafts. 0 = auto: chosen for each step by measurement."""
    num_drafts: int = -1
    """k = B - 1, the other way to say block_size. -1 = auto."""
    widths: tuple[int, ...] = ()
    """auto: the k to choose from, 0 among them. Empty takes some up to what the drafter was trained for."""
    propose_route: str = "paged"
    """How the draft worker attends to its context."""
    page_size: int = 16
    """Tokens in a page of KV."""
    mem_bytes: int = 0
    """The arena: KV of target and draft, and what goes between them. 0 = from the memory that is there."""
    max_running_requests: int = 32
    """Requests that hold memory at once."""
    max_queued_requests: int = 1024
    """Requests that wait beside them; past that clients get 429."""
    max_prefill_tokens: int = 512
    """Most prompt tokens computed in one step, decode rows included."""
    context_len: int = 0
    """Longest prompt plus answer, at least one token of each. 0 = the model's own limit."""
    eviction_policy: str = "lru"
    """Which cached conversation goes first."""
    ttl_s: float = 3600.0
    """Policy ttl: cached text that was unused for so long is evicted."""
    checkpoint_interval: int = 0
    """Tokens between stored states of a long prompt, for models with recurrent layers. 0 = by their size."""
    dtype: str = "auto"
    """Of weights and KV; auto is the checkpoint's, or float32 for a bfloat16 one on a CPU that cannot multiply it."""
    load_format: str = "auto"
    """auto reads the weights, dummy makes random ones."""
    device: str = "cpu"
    """Where the models run."""
    threads: int = 0
    """Torch threads of each worker. 0 = torch's own choice."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """TCP port; 0 takes a free one."""
    api_key: str = ""
    """Key that clients must send; empty lets everyone in."""
    run_dir: str = ""
    """Directory of sockets and configs; empty makes a fresh one. Removed at the end."""
    hang_timeout_s: float = 120.0
    """A process that gives no sign of life for so long is killed and started again. 0 = never."""
    spec_trace: int = 0
    """1 or 2 log a line of host times per step (device times need a CUDA device). 0 = off."""
    simulate_accept_length: float = 0.0
    """Load tests: force this mean accept length, the target's own token included. 0 = off."""
    log_level: str = "INFO"
    """Level of every process's log."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        if self.num_drafts >= 0 and self.block_size and self.block_size != self.num_drafts + 1:
            raise ValueError(
                f"--speculative-num-draft-tokens {self.block_size} means {self.block_size - 1} drafts and an anchor,"
                f" --spec-tokens says {self.num_drafts}"
            )
        if self.speculative_algorithm == NO_SPECULATION and (self.draft_model_path or self.asks_for_speculation):
            raise ValueError("--speculative-algorithm none, but other flags name a drafter or ask for drafts")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key must be printable ASCII")

    @property
    def asks_for_speculation(self) -> bool:
        """Flags, the drafter's folder apart, make no sense without it."""
        is_named = self.speculative_algorithm not in ("", NO_SPECULATION)
        return bool(is_named or self.asked_drafts or self.simulate_accept_length)

    @property
    def asked_drafts(self) -> int:
        """k as asked for, the largest of widths; 0 leaves it to the drafter."""
        if self.num_drafts >= 0:
            return self.num_drafts
        return max(0, self.block_size - 1, *self.widths)

    @property
    def is_auto(self) -> bool:
        """k is chosen for each step."""
        return self.block_size == 0 and self.num_drafts < 0


def _check_choices(config: LaunchConfig) -> None:
    choices = {
        "--speculative-algorithm": (config.speculative_algorithm, ("", *ALGORITHMS)),
        "--propose-route": (config.propose_route, ROUTES),
        "--radix-eviction-policy": (config.eviction_policy, EVICTION_POLICIES),
        "--dtype": (config.dtype, DTYPES),
        "--load-format": (config.load_format, LOAD_FORMATS),
        "--device": (config.device, DEVICES),
        "--log-level": (config.log_level, LOG_LEVELS),
    }
    for flag, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{flag} is {value!r}, known are {', '.join(name for name in allowed if name)}")


def _check_ranges(config: LaunchConfig) -> None:
    ranges = {
        "--page-size": (config.page_size, 1, 1024),
        "--mem-bytes": (config.mem_bytes, 0, 1 << 50),
        "--max-running-requests": (config.max_running_requests, 1, 4096),
        "--max-queued-requests": (config.max_queued_requests, 0, 1 << 20),
        "--chunked-prefill-size": (config.max_prefill_tokens, 1, 1 << 20),
        "--context-length": (config.context_len, 0, 1 << 24),
        "--ttl-s": (config.ttl_s, 0.001, 1e9),
        "--checkpoint-interval": (config.checkpoint_interval, 0, 1 << 24),
        "--threads": (config.threads, 0, 1024),
        "--port": (config.port, 0, 65535),
        "--hang-timeout-s": (config.hang_timeout_s, 0.0, 86_400.0),
        "--spec-trace": (config.spec_trace, 0, 2),
        "--simulate-accept-length": (config.simulate_accept_length, 0.0, 1024.0),
    }
    for flag, (value, lowest, highest) in ranges.items():
        if not lowest <= value <= highest:
            raise ValueError(f"{flag} is {value}, it must be between {lowest} and {highest}")
    if 0 < config.hang_timeout_s < SILENT_LOOKS * LOOK_S:
        raise ValueError(
            f"--hang-timeout-s is {config.hang_timeout_s:g}: a process counts as silent after"
            f" {SILENT_LOOKS * LOOK_S:g} s, which is the least; 0 is never"
        )
    if config.context_len == 1:
        raise ValueError("--context-length is 1: a prompt and an answer of one token each need 2")
    if config.block_size < 0 or config.block_size == 1:
        raise ValueError(f"--speculative-num-draft-tokens is {config.block_size}: the anchor and one draft need 2")
    if config.num_drafts == 0 or config.num_drafts < -1:
        raise ValueError(f"--spec-tokens is {config.num_drafts}, the least is 1")
    if config.widths:
        _check_widths(config)


def _check_widths(config: LaunchConfig) -> None:
    shown = ",".join(str(width) for width in config.widths)
    if not config.is_auto:
        raise ValueError(f"--spec-widths {shown} is a choice, but the number of draft tokens is given")
    if min(config.widths) != 0 or max(config.widths) == 0:
        raise ValueError(f"--spec-widths is {shown}: it needs 0, which is plain decoding, and a number of drafts")
