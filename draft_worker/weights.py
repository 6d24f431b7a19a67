"""Builds a DraftModel from the drafter's and the target's folders."""

from pathlib import Path

import torch

from draft_worker.borrowed import Borrowed, borrow, view_shared
from draft_worker.config import DraftConfig, resolve_dtype
from draft_worker.conv import LocalConv
from draft_worker.mask_token import mask_token_id, side_file_embedding
from draft_worker.model import DraftLayer, DraftModel
from draft_worker.selector import CandidateSelector
from draft_worker.shape import DraftShape
from draft_worker.tensors import DraftTensors, open_source, read_vocab_map
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, Rotary, activation
from memsvc.device.shared_weights import SharedWeights


def load_model(config: DraftConfig, shape: DraftShape, shared: SharedWeights | None = None) -> DraftModel:
    """The model that config names, on its device. Raises ValueError naming the tensor, key or file that is wrong.

    shared: where the target puts embedding and head. The model may run before it has, and gives sense after
    DraftModel.fill_late.
    """
    dtype = getattr(torch, resolve_dtype(config.dtype, shape))
    target = Path(config.target_path)
    if shared is None:
        borrowed = borrow(target, shape, config.load_format, dtype, config.device)
    else:
        borrowed = view_shared(target, shape, shared)
    with open_source(Path(config.draft_path), config.load_format, config.device) as source:
        tensors = DraftTensors(source, dtype, has_files=config.load_format == "auto")
        model = _build(config, shape, tensors, borrowed)
        tensors.refuse_leftovers()
    return model


def _build(config: DraftConfig, shape: DraftShape, tensors: DraftTensors, borrowed: Borrowed) -> DraftModel:
    vocab_map = _vocab_map(config, shape)
    layers = [_LayerTensors(tensors, shape, index) for index in range(shape.num_layers)]
    width, eps = shape.hidden_size, shape.rms_norm_eps
    own = tensors.find("embed_tokens.weight", shape.vocab_size, width)
    embedding = borrowed.embedding if own is None else own
    return DraftModel(
        shape=shape,
        layers=tuple(layer.build() for layer in layers),
        rotary=Rotary(shape.rope, config.device),
        feature_proj=Linear(tensors.get("fc.weight", width, shape.feature_width)).pack(),
        feature_norm=RMSNorm(tensors.get("hidden_norm.weight", width), eps),
        context_kv=_stacked([layer.kv for layer in layers]).pack(),
        context_k_norm=RMSNorm(torch.stack([layer.k_norm for layer in layers])[:, None], eps),
        norm=RMSNorm(tensors.get("norm.weight", width), eps),
        embedding=embedding,
        mask_row=_mask_row(tensors, shape, borrowed if own is None else Borrowed(own, own), config),
        head=_head(tensors, shape, borrowed, vocab_map),
        draft_to_target=vocab_map,
        selector=_selector(tensors, shape) if shape.has_selector else None,
        late=borrowed.late,
    )


def _vocab_map(config: DraftConfig, shape: DraftShape) -> torch.Tensor | None:
    """Token ids of a reduced head's rows; random weights take the first ones."""
    if shape.draft_vocab_size == shape.vocab_size:
        return None
    if config.load_format == "dummy":
        return torch.arange(shape.draft_vocab_size, device=config.device)
    return read_vocab_map(Path(config.draft_path), shape).to(config.device)


class _LayerTensors:
    """One layer's tensors. Its q, k and v rows are one matrix, and its k and v rows are also part of the context's."""

    def __init__(self, tensors: DraftTensors, shape: DraftShape, index: int) -> None:
        self._tensors = tensors
        self._shape = shape
        self._name = f"layers.{index}."
        q = self._projection("q", shape.num_heads, rotates=True)
        k = self._projection("k", shape.num_kv_heads, rotates=True)
        v = self._projection("v", shape.num_kv_heads, rotates=False)
        self.qkv = _stacked([q, k, v])
        self.kv = _stacked([k, v])
        self.q_norm = self._pairs_apart(self._get("self_attn.q_norm.weight", shape.head_dim))
        self.k_norm = self._pairs_apart(self._get("self_attn.k_norm.weight", shape.head_dim))

    def _get(self, name: str, *size: int) -> torch.Tensor:
        return self._tensors.get(self._name + name, *size)

    def _projection(self, part: str, num_heads: int, *, rotates: bool) -> Linear:
        shape = self._shape
        sizes: dict[str, tuple[int, ...]] = {"weight": (num_heads * shape.head_dim, shape.hidden_size)}
        if shape.attention_bias:
            sizes["bias"] = sizes["weight"][:1]
        made = {}
        for kind, size in sizes.items():
            tensor = self._get(f"self_attn.{part}_proj.{kind}", *size)
            by_head = tensor.view(num_heads, shape.head_dim, *size[1:])
            made[kind] = (self._pairs_apart(by_head, 1) if rotates else by_head).reshape(size)
        return Linear(made["weight"], made.get("bias"))

    def _pairs_apart(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Dims of a head reordered so that rotated neighbours become halves. q and k change alike, so q . k does not."""
        if self._shape.is_neox:
            return tensor
        rotary_dim = self._shape.rope.rotary_dim
        order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, self._shape.head_dim)]
        return tensor.index_select(dim, torch.tensor(order, device=tensor.device))

    def _conv(self, part: str) -> LocalConv | None:
        shape = self._shape
        if not shape.has_conv:
            return None
        num_rows = 2 * shape.conv_kernel_size * (shape.hidden_size // shape.conv_group_size)
        return LocalConv(
            self._get(f"{part}_conv.base_kernel", 2, shape.conv_kernel_size, shape.hidden_size),
            Linear(self._get(f"{part}_conv.kernel_projection.weight", num_rows, shape.hidden_size)).pack(),
        )

    def build(self) -> DraftLayer:
        """The layer."""
        shape = self._shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        gate_up = [
            Linear(self._get(f"mlp.{part}_proj.weight", shape.intermediate_size, width)) for part in ("gate", "up")
        ]
        qk_norm = torch.cat([self.q_norm.expand(shape.num_heads, -1), self.k_norm.expand(shape.num_kv_heads, -1)])
        bias = self._get("self_attn.o_proj.bias", width) if shape.attention_bias else None
        sink = self._get("self_attn.attention_sink_bias", shape.num_heads) if shape.attention_sink_bias else None
        return DraftLayer(
            shape=shape,
            input_norm=RMSNorm(self._get("input_layernorm.weight", width), eps),
            qkv=self.qkv.pack(),
            qk_norm=RMSNorm(qk_norm, eps),
            out=Linear(self._get("self_attn.o_proj.weight", width, shape.num_heads * shape.head_dim), bias).pack(),
            post_norm=RMSNorm(self._get("post_attention_layernorm.weight", width), eps),
            mlp=GatedMlp(
                _stacked(gate_up).pack(),
                Linear(self._get("mlp.down_proj.weight", width, shape.intermediate_size)).pack(),
                activation("silu"),
            ),
            attention_conv=self._conv("attention"),
            mlp_conv=self._conv("mlp"),
            sink=sink,
        )


def _stacked(parts: list[Linear]) -> Linear:
    """One matrix whose output is the parts' outputs side by side."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _selector(tensors: DraftTensors, shape: DraftShape) -> CandidateSelector:
    name, rank = "candidate_selector.", shape.selector_rank
    return CandidateSelector(
        hidden_projection=tensors.get(f"{name}hidden_projection.weight", rank, shape.hidden_size),
        predecessor=tensors.get(f"{name}predecessor_codebook", shape.vocab_size, rank),
        successor=tensors.get(f"{name}successor_codebook", shape.vocab_size, rank),
    )


def _head(tensors: DraftTensors, shape: DraftShape, borrowed: Borrowed, vocab_map: torch.Tensor | None) -> torch.Tensor:
    own = tensors.find("lm_head.weight", shape.draft_vocab_size, shape.hidden_size)
    if own is not None:
        return own
    return borrowed.head if vocab_map is None else borrowed.rows(borrowed.head, vocab_map)


def _mask_row(tensors: DraftTensors, shape: DraftShape, borrowed: Borrowed, config: DraftConfig) -> torch.Tensor:
    """A vector in the checkpoint, else one in the side file, else the embedding of the mask token."""
    embedding = borrowed.embedding
    folder = Path(config.draft_path)
    own = tensors.find("mask_embedding", shape.hidden_size)
    if own is None:
        own = side_file_embedding(folder, shape.hidden_size, tensors.dtype)
    if own is None:
        token_id = mask_token_id(shape, folder, Path(config.target_path))
        return borrowed.rows(embedding, torch.tensor([token_id]))[0]
    return own.to(embedding.device)
