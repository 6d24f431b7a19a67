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
from target_worker.model.fp8_stacks import kept_in_fp8, stays_fp8
from target_worker.model.linear_spec import LINEAR
from target_worker.model.named import Named
from target_worker.model.tensors import refuse_misfits, root_of, wanted_of


def load_target(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    shared: SharedWeights | None = None,
    quantization: str = "",
) -> tuple[Decoder, TargetShape]:
    """The target of a Hugging Face folder, weights in dtype on device; load_format as load_source has it.

    shared: where embedding and head are put, for the draft to read; None keeps them like all others. quantization: fp8
    rounds the layers' matrices to 8 bits, one after the other; those stored so stay so on a CUDA device anyway. Raises
    ValueError if the config is not supported, or a tensor is missing, shaped otherwise or left over.
    """
    shape = TargetShape.from_folder(path)
    torch_dtype = getattr(torch, shape.resolve_dtype(dtype))
    source = load_source(Path(path), load_format, device)
    if isinstance(source, CheckpointReader):
        with source:
            refuse_misfits(shape, source)
            return build(shape, source, torch_dtype, device, shared, quantization), shape
    return build(shape, source, torch_dtype, device, shared, quantization), shape


def build(
    shape: TargetShape,
    source: TensorSource,
    dtype: torch.dtype,
    device: str,
    shared: SharedWeights | None = None,
    quantization: str = "",
) -> Decoder:
    """The decoder of that shape with weights from source."""
    if shared is not None and shared.is_tied != shape.tie_word_embeddings:
        raise ValueError(f"tie_word_embeddings is {shape.tie_word_embeddings}, the layout was made for the opposite")
    root, wanted = root_of(shape, source), wanted_of(shape, source)
    named = Named(source, wanted, shape, dtype, kept_in_fp8(wanted, _staying(source, dtype, device), quantization))
    embedding = named.get(f"{root}embed_tokens.weight")
    if shared is not None:
        # Placed one after the other, so that no two copies of both are held at once.
        embedding = shared.fill(shared.embedding, embedding)
    layers = [_layer(named.below(f"{root}layers.{i}."), kind == LINEAR) for i, kind in enumerate(shape.layer_types)]
    norm = named.norm(f"{root}norm")
    head = embedding if shape.tie_word_embeddings else named.get("lm_head.weight")
    if shared is not None and not shape.tie_word_embeddings:
        head = shared.fill(shared.head, head)
    return Decoder(shape, embedding, layers, norm, Linear(head).pack(), Rotary(shape.rope, device))


def _staying(source: TensorSource, dtype: torch.dtype, device: str) -> frozenset[str]:
    """Tensors that stay in fp8, because they are stored so."""
    if not stays_fp8(device, str(dtype).removeprefix("torch.")) or not isinstance(source, CheckpointReader):
        return frozenset()
    return source.fp8_names()


def _layer(named: Named, is_linear: bool) -> DecoderLayer | DeltaLayer:
    shape = named.shape
    if is_linear:
        assert shape.linear is not None, f"{shape.layer_types} without sizes"
        return delta_layer(named, shape.linear)
    is_gated = shape.is_hybrid_family
    return DecoderLayer(
        input_norm=named.norm("input_layernorm"),
        qkv=gated_qkv(named) if is_gated else named.linear(*(f"self_attn.{part}_proj" for part in "qkv")),
        q_norm=named.norm("self_attn.q_norm") if shape.qk_norm else None,
        k_norm=named.norm("self_attn.k_norm") if shape.qk_norm else None,
        o=named.linear("self_attn.o_proj"),
        post_norm=named.norm("post_attention_layernorm"),
        mlp=named.mlp(),
        is_gated=is_gated,
    )
