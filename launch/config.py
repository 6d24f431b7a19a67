"""What the one command was asked to do, after all flags are read."""

import re
from dataclasses import dataclass

from draft_worker.config import ROUTES
from launch.silence import LOOK_S, SILENT_LOOKS
from memsvc.config import LOG_LEVELS
from memsvc.core.config import EVICTION_POLICIES
from memsvc.device.kv_dtype import AUTO, KV_CACHE_DTYPES
from target_worker.config import ATTENTION_BACKENDS
from target_worker.model.fp8_stacks import QUANTIZATIONS
from target_worker.model.linear_spec import STATE_DTYPES

DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "dummy")
DEVICE_FORM = re.compile(r"cpu|cuda(:\d+)?")
NO_SPECULATION = "NONE"
ALGORITHMS = ("DFLASH", NO_SPECULATION)
MPS_CHOICES = ("off", "on")
LARGE_DEVICE_BYTES = 60 << 30
CPU_PREFILL_TOKENS = 512
CUDA_PREFILL_TOKENS = 2048
LARGE_CUDA_PREFILL_TOKENS = 8192
"""Most prompt tokens of a step, if nobody says otherwise; the last on a device of at least LARGE_DEVICE_BYTES.

A step with prompts also has a verify and a draft of the requests that decode: 12 ms beside 46 ms of 2048 prompt tokens
(H200, 8B, 32 requests). By that a quarter of such steps is 5 % more throughput; who decodes then waits 0.18 s.
"""


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
    """The arena: KV of target and draft, and what goes between them. 0 = from the memory that is there.
    On a CUDA device it wins over mem_fraction_static."""
    max_running_requests: int = 32
    """Requests that hold memory at once."""
    max_queued_requests: int = 1024
    """Requests that wait beside them; past that clients get 429."""
    max_prefill_tokens: int = 0
    """Most prompt tokens computed in one step. 0 = CPU_PREFILL_TOKENS, or by the size of the device."""
    context_len: int = 0
    """Longest prompt plus answer, at least one token of each. 0 = the model's own limit."""
    eviction_policy: str = "lru"
    """Which cached conversation goes first."""
    ttl_s: float = 3600.0
    """Policy ttl: cached text that was unused for so long is evicted."""
    checkpoint_interval: int = 0
    """Tokens between stored states of a long prompt, for models with recurrent layers. 0 = by their size."""
    dtype: str = "auto"
    """Of weights and arithmetic; auto is the checkpoint's, or float32 for a bfloat16 one that the CPU cannot multiply."""
    kv_cache_dtype: str = AUTO
    """Of the target's keys and values in the pool, one of KV_CACHE_DTYPES."""
    draft_kv_cache_dtype: str = AUTO
    """Of the drafter's."""
    mamba_ssm_dtype: str = "float32"
    """Of the recurrent states of a hybrid target, one of STATE_DTYPES."""
    quantization: str = ""
    """fp8 rounds the matrices of the target's layers while they are read; empty leaves them as they are stored."""
    load_format: str = "auto"
    """auto reads the weights, dummy makes random ones."""
    device: str = "cpu"
    """Where the models run and the arena lies: cpu, cuda or cuda:N."""
    mem_fraction_static: float = 0.85
    """CUDA: share of the free memory that weights, contexts, workspaces, graphs and arena may take together."""
    cuda_graph_max_bs: int = 64
    """CUDA: largest batch that is captured; larger ones run without a graph."""
    disable_cuda_graph: bool = False
    """CUDA: run the kernels of a step one by one."""
    attention_backend: str = "auto"
    """CUDA: what attends prompt chunks, one of ATTENTION_BACKENDS."""
    mps: str = "off"
    """CUDA: on runs the workers under an MPS daemon of this server's own."""
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
    """1 logs a line of host times per step, 2 one of device times where there is a CUDA device. 0 = off."""
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
        if self.has_mps and not self.is_cuda:
            raise ValueError(f"--mps is on, which needs a CUDA device; --device is {self.device}")
        if self.attention_backend not in ("auto", "torch") and not self.is_cuda:
            raise ValueError(
                f"--attention-backend {self.attention_backend} needs a CUDA device; --device is {self.device}"
            )
        if self.quantization and not self.is_cuda:
            raise ValueError(f"--quantization {self.quantization} needs a CUDA device; --device is {self.device}")
        if self.quantization and self.dtype not in ("auto", "bfloat16"):
            raise ValueError(f"--quantization {self.quantization} computes in bfloat16; --dtype is {self.dtype}")
        if self.speculative_algorithm == NO_SPECULATION and (self.draft_model_path or self.asks_for_speculation):
            raise ValueError("--speculative-algorithm none, but other flags name a drafter or ask for drafts")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key must be printable ASCII")

    @property
    def is_cuda(self) -> bool:
        """The models run on a CUDA device."""
        return self.device != "cpu"

    @property
    def has_mps(self) -> bool:
        """The workers run under an MPS daemon."""
        return self.mps == "on"

    @property
    def prefill_tokens(self) -> int:
        """Most prompt tokens computed in one step. Of large devices card.with_prefill_tokens knows, not the default."""
        return self.max_prefill_tokens or (CUDA_PREFILL_TOKENS if self.is_cuda else CPU_PREFILL_TOKENS)

    @property
    def torch_device(self) -> str:
        """device with its number: every process that this one starts numbers devices alike."""
        return "cuda:0" if self.device == "cuda" else self.device

    @property
    def asks_for_speculation(self) -> bool:
        """Flags, the drafter's folder apart, make no sense without it."""
        is_named = self.speculative_algorithm not in ("", NO_SPECULATION)
        return bool(is_named or self.asked_drafts or self.simulate_accept_length or self.draft_kv_cache_dtype != AUTO)

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
        "--kv-cache-dtype": (config.kv_cache_dtype, KV_CACHE_DTYPES),
        "--speculative-draft-kv-cache-dtype": (config.draft_kv_cache_dtype, KV_CACHE_DTYPES),
        "--mamba-ssm-dtype": (config.mamba_ssm_dtype, STATE_DTYPES),
        "--load-format": (config.load_format, LOAD_FORMATS),
        "--quantization": (config.quantization, QUANTIZATIONS),
        "--log-level": (config.log_level, LOG_LEVELS),
        "--attention-backend": (config.attention_backend, ATTENTION_BACKENDS),
        "--mps": (config.mps, MPS_CHOICES),
    }
    for flag, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{flag} is {value!r}, known are {', '.join(name for name in allowed if name)}")
    if not DEVICE_FORM.fullmatch(config.device):
        raise ValueError(f"--device is {config.device!r}, known are cpu, cuda and cuda:N")


def _check_ranges(config: LaunchConfig) -> None:
    ranges = {
        "--page-size": (config.page_size, 1, 1024),
        "--mem-bytes": (config.mem_bytes, 0, 1 << 50),
        "--mem-fraction-static": (config.mem_fraction_static, 0.01, 1.0),
        "--cuda-graph-max-bs": (config.cuda_graph_max_bs, 1, 4096),
        "--max-running-requests": (config.max_running_requests, 1, 4096),
        "--max-queued-requests": (config.max_queued_requests, 0, 1 << 20),
        "--chunked-prefill-size": (config.max_prefill_tokens, 0, 1 << 20),
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
