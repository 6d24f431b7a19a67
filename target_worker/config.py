"""What the target worker is told at start. No torch here: launch imports this file."""

from dataclasses import dataclass

from memsvc.device.kv_dtype import AUTO
from target_worker.step_sizes import StepSizes

ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashinfer")
"""Values of --attention-backend, as memsvc.device.attention_backends knows them."""
DEVICE_TIMES = 2
"""spec_trace from which device times are taken."""


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
    """auto (the checkpoint's), bfloat16 or float32."""
    kv_cache_dtype: str = AUTO
    """Of the pages of target_kv, one of KV_CACHE_DTYPES."""
    mamba_ssm_dtype: str = "float32"
    """Of the recurrent states of a hybrid, one of STATE_DTYPES."""
    device: str = "cpu"
    """Torch device of weights and arena."""
    load_format: str = "auto"
    """auto reads safetensors, dummy makes random weights."""
    quantization: str = ""
    """CUDA: fp8 rounds the layers' matrices; empty leaves them as they are stored."""
    page_size: int = 16
    """Tokens in a page of a token kind."""
    max_running_requests: int = 32
    """Requests that hold memory at once; the others wait."""
    max_prefill_tokens: int = 512
    """Most prompt tokens computed in one step: decode rows included on the CPU, beside them on a CUDA device."""
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
    """1 logs a line of host times per step, 2 one of device times where there is a CUDA device. 0 = off."""
    cuda_graph_max_bs: int = 64
    """CUDA: largest batch of blocks that is captured; larger ones run without a graph."""
    disable_cuda_graph: bool = False
    """CUDA: run the step's kernels one by one."""
    attention_backend: str = "auto"
    """CUDA: one of ATTENTION_BACKENDS, for prompt chunks. Blocks have one that runs in graphs."""
    log_level: str = "INFO"
    """Level of the process log."""

    @property
    def block_size(self) -> int:
        """B: most rows of a verify block, the anchor included."""
        return 1 + self.num_draft_tokens

    @property
    def is_cuda(self) -> bool:
        """The worker runs on a CUDA device."""
        return self.device != "cpu"

    @property
    def sizes(self) -> StepSizes:
        """Rows of its steps."""
        return StepSizes(
            is_cuda=self.is_cuda,
            max_running_requests=self.max_running_requests,
            block_size=self.block_size,
            max_prefill_tokens=self.max_prefill_tokens,
            cuda_graph_max_bs=self.cuda_graph_max_bs,
        )

    @property
    def max_step_rows(self) -> int:
        """Rows of features that fit into the exchange, no less than a step has."""
        return self.sizes.feature_rows
