"""What the draft worker is told at start, and what it needs from the pool. No torch here: launch imports this file."""

from dataclasses import dataclass

from draft_worker.shape import DraftShape
from memsvc.device.kv_dtype import AUTO, KV_CACHE_DTYPES, kv_item_bytes
from memsvc.wire.mem import KindSpec

DRAFT_KV = "draft_kv"
"""The kind of page that holds a drafter's context K and V."""

ROUTES = ("paged", "materialized", "per_request")
"""paged is the product; the others exist to be compared with."""

PIECE_ROWS = 2048
"""Rows of prompts' features projected at a time on a CUDA device: their projections take 40 KB each at 27B geometry."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Dtypes of weights and arithmetic. float16 is not one: residuals of about 7e4 overflow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Made once by launch, written as JSON into the run directory."""

    run_dir: str
    """Directory of the sockets, mode 0700."""
    draft_path: str
    """Folder of the drafter: config.json and safetensors."""
    target_path: str
    """Folder of the target, whose embedding and head the drafter borrows."""
    engine: str = "main"
    """Name under which target and draft register with the memory service."""
    dtype: str = "auto"
    """auto (the checkpoint's), bfloat16 or float32."""
    kv_cache_dtype: str = AUTO
    """Of the pages of draft_kv, one of KV_CACHE_DTYPES."""
    device: str = "cpu"
    """Torch device of weights and arena."""
    load_format: str = "auto"
    """auto reads safetensors, dummy makes random weights for the config.json."""
    num_draft_tokens: int = 0
    """k: most drafts per block, at most the trained block_size - 1. 0 = as many as trained."""
    propose_route: str = "paged"
    """One of ROUTES."""
    max_running_requests: int = 32
    """Requests that can be open at once."""
    context_len: int = 8192
    """Longest prompt plus answer in tokens."""
    num_threads: int = 0
    """Torch threads. 0 = torch's own choice."""
    spec_trace: int = 0
    """1 logs a line of host times per step, 2 one of device times where there is a CUDA device. 0 = off."""
    disable_cuda_graph: bool = False
    """Run the step's kernels one by one."""
    cuda_graph_max_bs: int = 64
    """Largest batch that is captured; larger ones run without a graph."""
    log_level: str = "INFO"
    """Level of the process log."""

    def __post_init__(self) -> None:
        if self.propose_route not in ROUTES:
            raise ValueError(f"--propose-route {self.propose_route!r} is none of {', '.join(ROUTES)}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"--load-format {self.load_format!r} is neither auto nor dummy")
        if self.dtype != "auto" and self.dtype not in DTYPE_BYTES:
            raise ValueError(f"--dtype {self.dtype!r} is none of auto, {', '.join(DTYPE_BYTES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"--speculative-draft-kv-cache-dtype {self.kv_cache_dtype!r} is none of {known}")
        for name in ("max_running_requests", "context_len", "cuda_graph_max_bs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")

    def drafts_per_block(self, shape: DraftShape) -> int:
        """k in force. Raises ValueError if more drafts are asked for than the drafter was trained for."""
        if not 0 <= self.num_draft_tokens < shape.block_size:
            raise ValueError(
                f"{self.num_draft_tokens} drafts a block are asked for,"
                f" the drafter was trained for {shape.block_size - 1} (block_size {shape.block_size})"
            )
        return self.num_draft_tokens or shape.block_size - 1


def resolve_dtype(dtype: str, shape: DraftShape) -> str:
    """The dtype in force: a key of DTYPE_BYTES. auto is the checkpoint's, bfloat16 if that is not served."""
    if dtype != "auto":
        return dtype
    return shape.dtype if shape.dtype in DTYPE_BYTES else "bfloat16"


def kind_specs(shape: DraftShape, page_size: int, dtype: str, kv_cache_dtype: str = AUTO) -> list[KindSpec]:
    """The page kinds a drafter needs: one, draft_kv. dtype is auto or a key of DTYPE_BYTES.

    window needs no slack for the block. A block with its anchor at P reads context [P - W + 1, P)
    in row 0 and less in later rows, and P is the committed length when the block is drafted: what
    lies W or more below any length in flight is read by nobody.
    """
    item = kv_item_bytes(kv_cache_dtype, DTYPE_BYTES[resolve_dtype(dtype, shape)])
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * item
    return [
        KindSpec(
            name=DRAFT_KV,
            page_bytes=shape.num_layers * page_size * token_bytes,
            tokens_per_page=page_size,
            window=shape.window,
        )
    ]
