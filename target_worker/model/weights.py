"""From a folder's tensors to a Decoder."""

from pathlib import Path

import torch

from memsvc.device.checkpoint import CheckpointReader, TensorSource, load_source
from memsvc.device.layers import Linear
from memsvc.device.rope import Rotary
from memsvc.device.shared_weights import SharedWeights
from target_worker.model.config import TargetShape
from target_worker.model.decoder import Decoder, DecoderLayer
from target_worker.model.delta_layer import DeltaLayer
from target_worker.model.delta_weights import delta_layer, gated_qkv
from target_worker.model.linear_spec import LINEAR
from target_worker.model.named import Named

_OTHER_PARTS = ("mtp.", "model.visual.")
"""Tensors of a hybrid's checkpoint that text needs not: the head for several tokens, the vision tower."""


def load_target(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    shared: SharedWeights | None = None,
) -> tuple[Decoder, TargetShape]:
    """The target of a Hugging Face folder, weights in dtype on device; load_format as load_source has it.

    shared: where embedding and head are put, for the draft to read; None keeps them like all others. Raises ValueError if the config is not supported, or a tensor is missing, shaped otherwise or left over.
    """
    shape = TargetShape.from_folder(path)
    torch_dtype = getattr(torch, shape.resolve_dtype(dtype))
    source = load_source(Path(path), load_format, device)
    if isinstance(source, CheckpointReader):
        with source:
            return build(shape, source, torch_dtype, device, shared), shape
    return build(shape, source, torch_dtype, device, shared), shape


def build(
    shape: TargetShape, source: TensorSource, dtype: torch.dtype, device: str, shared: SharedWeights | None = None
) -> Decoder:
    """The decoder of that shape with weights from source."""
    if shared is not None and shared.is_tied != shape.tie_word_embeddings:
        raise ValueError(f"tie_word_embeddings is {shape.tie_word_embeddings}, the layout was made for the opposite")
    root = _root(shape, source)
    embedding = source.get(f"{root}embed_tokens.weight", (shape.vocab_size, shape.hidden_size), dtype)
    if shared is not None:
        # Placed one after the other, so that no two copies of both are held at once.
        embedding = shared.fill(shared.embedding, embedding)
    layers = [
        _layer(Named(source, f"{root}layers.{i}.", shape, dtype), kind == LINEAR)
        for i, kind in enumerate(shape.layer_types)
    ]
    norm = Named(source, root, shape, dtype).norm("norm", shape.hidden_size)
    head = embedding if shape.tie_word_embeddings else source.get("lm_head.weight", tuple(embedding.shape), dtype)
    if shared is not None and not shape.tie_word_embeddings:
        head = shared.fill(shared.head, head)
    _refuse_leftovers(source.unused(), shape)
    return Decoder(shape, embedding, layers, norm, Linear(head).pack(), Rotary(shape.rope, device))


def _root(shape: TargetShape, source: TensorSource) -> str:
    """Prefix of the text network's tensors: one part of several, or all there is."""
    nested = "model.language_model."
    return nested if shape.is_hybrid_family and source.has(f"{nested}embed_tokens.weight") else "model."


def _layer(named: Named, is_linear: bool) -> DecoderLayer | DeltaLayer:
    shape = named.shape
    if is_linear:
        assert shape.linear is not None, f"{shape.layer_types} without sizes"
        return delta_layer(named, shape.linear)
    hidden, head_dim, is_gated = shape.hidden_size, shape.head_dim, shape.is_hybrid_family
    q_size, kv_size = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    return DecoderLayer(
        input_norm=named.norm("input_layernorm", hidden),
        qkv=gated_qkv(named) if is_gated else named.linear(qkv, hidden, shape.qkv_bias),
        q_norm=named.norm("self_attn.q_norm", head_dim) if shape.qk_norm else None,
        k_norm=named.norm("self_attn.k_norm", head_dim) if shape.qk_norm else None,
        o=named.linear({"self_attn.o_proj": hidden}, q_size, shape.o_bias),
        post_norm=named.norm("post_attention_layernorm", hidden),
        mlp=named.mlp(),
        is_gated=is_gated,
    )


def _refuse_leftovers(names: list[str], shape: TargetShape) -> None:
    """A tensor nobody asked for means that the network is not the one we compute."""
    harmless = ("lm_head.weight",) if shape.tie_word_embeddings else ()
    other = _OTHER_PARTS if shape.is_hybrid_family else ()
    left = [
        name
        for name in names
        if name not in harmless and not name.startswith(other) and not name.endswith("rotary_emb.inv_freq")
    ]
    if left:
        raise ValueError(
            f"the checkpoint holds {len(left)} tensors that {shape.architecture} has no use for: {left[:4]}"
        )
