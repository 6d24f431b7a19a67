"""What a server takes of a CUDA device beside weights and arena: contexts, workspaces and graph pools, estimated.

torch's allocator does not see the arena and takes what it needs beside it, so all of it has to be left free when the
arena is made.
"""

from dataclasses import dataclass
from pathlib import Path

from draft_worker.config import PIECE_ROWS
from launch.config import LaunchConfig
from launch.models import Models
from launch.plan import DevicePart
from launch.weight_bytes import draft_weight_bytes, target_weight_bytes
from memsvc.device.buckets import bucket_sizes
from memsvc.device.fixed_frames import SharedForm
from target_worker.model.config import DTYPE_BYTES
from target_worker.model.linear_spec import RING_PAGES, LinearSpec, ring_page_rows
from target_worker.step_sizes import MOST_PROMPTS, prompt_buckets

CONTEXT_BYTES = 756 << 20
"""A worker with torch and its kernels loaded, on an H200 with CUDA 13: what NVML shows less what allocators and the
arena hold, 790 to 797 MB for each of the two workers of three servers."""
WORKSPACE_BYTES = 32 << 20
"""Workspace of cuBLAS, one a stream, on Hopper (its documentation)."""
LIBRARY_BYTES = 3 * WORKSPACE_BYTES
"""Of eager work, of capture, of the lane."""
PREFILL_BYTES = 128 << 20
"""Workspace of FlashInfer's attention, if prompts are attended by it."""
SPLITS = 528
"""Parts that attention cuts contexts in, all heads together: four for each of 132 multiprocessors."""
ROUNDING = 1.2
"""torch's allocator takes blocks of 2 and 20 MiB and cannot use every rest."""
_WIDE_COPIES = 4
"""Tensors as wide as the model that a layer holds at once: residual, normed, the layer's output, a copy."""
_FLOAT32 = 4
CHUNK_ROWS = 64
"""Rows that a prompt's recurrence computes at once, by fla-core's kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSizes:
    """Of one network, as far as its forward's memory depends on them."""

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Of each."""
    vocab_size: int
    """Columns of the logits."""
    linear: LinearSpec | None = None
    """The recurrent layers, if there are any."""

    def layer_bytes(self, num_rows: int, item: int) -> int:
        """The most that a forward over so many rows holds in a layer."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        # Of an MLP gate and up and their product, and the product of the layer before.
        widest = max(4 * self.intermediate_size, 2 * heads) * item
        if self.linear is not None:
            widest = max(widest, _linear_row_bytes(self.linear, item))
        return num_rows * (_WIDE_COPIES * self.hidden_size * item + widest)

    def state_bytes(self, num_reqs: int) -> int:
        """States of one layer as prompts read and write them: where they begin, what is computed, and a copy."""
        linear = self.linear
        return 3 * num_reqs * linear.value_size * linear.k_dim * _FLOAT32 if linear else 0

    def replay_bytes(self, num_places: int, block_size: int, page_size: int, item: int) -> int:
        """Rows of blocks in a recurrent layer, those that are replayed among them (kernels.delta_rows.RowsAtHand)."""
        if self.linear is None:
            return 0
        keys, heads = self.linear.num_k_heads * self.linear.k_dim, self.linear.num_v_heads
        # Keys and values, and of each head a sum in float64 and a number in float32.
        row = (self.linear.conv_dim - keys) * item + heads * (8 + _FLOAT32)
        return num_places * (RING_PAGES * ring_page_rows(page_size, block_size) * row + block_size * keys * item)

    def logits_bytes(self, num_rows: int, item: int) -> int:
        """Logits of so many rows, and once more in float32."""
        return num_rows * self.vocab_size * (item + _FLOAT32)

    def scratch_bytes(self, num_places: int, block_size: int) -> int:
        """Partial results of attention, which kernels add up."""
        chunks = SPLITS // self.num_kv_heads + num_places
        return chunks * self.num_heads * block_size * (self.head_dim + 2) * _FLOAT32


def _linear_row_bytes(spec: LinearSpec, item: int) -> int:
    """A row of a prompt in a recurrent layer: what is projected, and what the rule holds, by kernels or by torch."""
    projected = (spec.conv_dim + spec.value_size + 2 * spec.gate_width) * item
    heads = spec.num_v_heads * max(spec.k_dim, spec.v_dim)
    # As convolved, q and k at unit length, what is solved of each row and two outputs, and a state for each chunk. By
    # torch q, k and v are there twice, once padded.
    by_kernels = (2 * spec.conv_dim - spec.value_size + 4 * heads + spec.value_size * spec.k_dim // CHUNK_ROWS) * item
    by_torch = (2 * spec.conv_dim + 3 * spec.value_size) * _FLOAT32
    return projected + max(by_kernels, by_torch)


def device_parts(config: LaunchConfig, models: Models) -> list[DevicePart]:
    """All that is taken beside the arena, a line each; the shared weights lie in the arena and are not among it."""
    item = DTYPE_BYTES[models.target.resolve_dtype(config.dtype)]
    target = _target_sizes(models)
    weights = target_weight_bytes(models.target, config.dtype, models.fp8) - shared_bytes(config, models)
    places = bucket_sizes(config.cuda_graph_max_bs, config.max_running_requests)[-1]
    rows, block = places * models.block_size, (models.block_size, config.page_size)
    parts = [
        DevicePart("target weights", weights),
        DevicePart("target context", CONTEXT_BYTES),
        DevicePart("target workspaces", LIBRARY_BYTES + _eager_bytes(config, models, rows, item)),
        DevicePart(
            "target graphs",
            _rounded(_graph_bytes(target, places, *block, item) + _prompt_graph_bytes(config, target, item)),
        ),
    ]
    if models.draft is None:
        return parts
    draft = _draft_sizes(models)
    folder = Path(config.draft_model_path) if config.load_format == "auto" else None
    projected = 4 * models.draft.num_layers * draft.num_kv_heads * draft.head_dim * item
    features = min(config.prefill_tokens, PIECE_ROWS) * (models.feature_row_bytes + projected)
    return [
        *parts,
        DevicePart("draft weights", draft_weight_bytes(models.draft, config.dtype, folder)),
        DevicePart("draft context", CONTEXT_BYTES),
        DevicePart("draft workspaces", LIBRARY_BYTES + _rounded(features)),
        DevicePart("draft graphs", _rounded(_graph_bytes(draft, places, *block, item))),
    ]


def shared_bytes(config: LaunchConfig, models: Models) -> int:
    """Embedding and head in the arena, if there is a drafter to read them too."""
    if not config.is_cuda or models.draft is None:
        return 0
    target = models.target
    return SharedForm(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        item_bytes=DTYPE_BYTES[target.resolve_dtype(config.dtype)],
        is_tied=target.tie_word_embeddings,
    ).num_bytes


def _eager_bytes(config: LaunchConfig, models: Models, block_rows: int, item: int) -> int:
    """Prefill beside blocks: all rows through the layers, logits of blocks and of the last row of each request."""
    sizes, most = _target_sizes(models), config.max_running_requests
    table = 4 * (most + 1) * -(-models.context_len // config.page_size)
    logits = sizes.logits_bytes(block_rows + most, item)
    workspace = PREFILL_BYTES if config.attention_backend in ("auto", "flashinfer") else 0
    rows = sizes.layer_bytes(config.prefill_tokens + block_rows, item) + sizes.state_bytes(most)
    return _rounded(rows + logits + table) + workspace


def _graph_bytes(sizes: ForwardSizes, places: int, block_size: int, page_size: int, item: int) -> int:
    """The pool that all buckets share is as large as the largest needs it."""
    num_rows = places * block_size
    scratch = sizes.scratch_bytes(places, block_size) + sizes.replay_bytes(places, block_size, page_size, item)
    return sizes.layer_bytes(num_rows, item) + sizes.logits_bytes(num_rows, item) + scratch


def _prompt_graph_bytes(config: LaunchConfig, sizes: ForwardSizes, item: int) -> int:
    """Of few prompt rows. They share the pool of verify, which may leave it in pieces that are none of theirs."""
    if sizes.linear is not None or config.disable_cuda_graph:
        return 0
    rows = max(prompt_buckets(config.prefill_tokens, config.attention_backend), default=0)
    forward = sizes.layer_bytes(rows, item) + sizes.logits_bytes(min(rows, MOST_PROMPTS), item)
    return forward if rows else 0


def _rounded(num_bytes: int) -> int:
    return int(ROUNDING * num_bytes)


def _target_sizes(models: Models) -> ForwardSizes:
    shape = models.target
    return ForwardSizes(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        linear=shape.linear,
    )


def _draft_sizes(models: Models) -> ForwardSizes:
    shape = models.draft
    assert shape is not None, "sizes of a drafter that is not there"
    return ForwardSizes(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.draft_vocab_size,
    )
