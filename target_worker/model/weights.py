"""From a folder's tensors to a Decoder."""

from pathlib import Path

import torch

from memsvc.device.checkpoint import CheckpointReader, TensorSource, load_source
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, activation
from memsvc.device.rope import Rotary
from target_worker.model.config import TargetShape
from target_worker.model.decoder import Decoder, DecoderLayer


def load_target(
    path: str | Path, dtype: str = "auto", device: str = "cpu", load_format: str = "auto"
) -> tuple[Decoder, TargetShape]:
    """The target of a Hugging Face folder, weights in dtype on device; load_format as load_source has it.

    Raises ValueError if the config is not supported, or a tensor is missing, shaped otherwise or left over.
    """
    shape = TargetShape.from_folder(path)
    torch_dtype = getattr(torch, shape.resolve_dtype(dtype))
    source = load_source(Path(path), load_format, device)
    if isinstance(source, CheckpointReader):
        with source:
            return build(shape, source, torch_dtype, device), shape
    return build(shape, source, torch_dtype, device), shape


def build(shape: TargetShape, source: TensorSource, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder of that shape with weights from source."""
    embedding = source.get("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size), dtype)
    layers = [_layer(_Named(source, f"model.layers.{i}.", dtype), shape) for i in range(shape.num_layers)]
    norm = RMSNorm(source.get("model.norm.weight", (shape.hidden_size,), dtype), shape.rms_norm_eps)
    head = embedding if shape.tie_word_embeddings else source.get("lm_head.weight", tuple(embedding.shape), dtype)
    _refuse_leftovers(source.unused(), shape)
    return Decoder(shape, embedding, layers, norm, Linear(head).pack(), Rotary(shape.rope, device))


class _Named:
    """A source below a name prefix."""

    def __init__(self, source: TensorSource, prefix: str, dtype: torch.dtype) -> None:
        self.source, self.prefix, self.dtype = source, prefix, dtype

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return self.source.get(self.prefix + name, shape, self.dtype)

    def linear(self, names: dict[str, int], num_in: int, bias: bool) -> Linear:
        """One matrix of the projections stacked in order; names give each one's number of outputs."""
        weights = [self.get(f"{name}.weight", num_out, num_in) for name, num_out in names.items()]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = torch.cat([self.get(f"{name}.bias", n) for name, n in names.items()]) if bias else None
        return Linear(weight, biases).pack()

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.get(f"{name}.weight", size), eps)


def _layer(named: _Named, shape: TargetShape) -> DecoderLayer:
    hidden, eps, head_dim = shape.hidden_size, shape.rms_norm_eps, shape.head_dim
    q_size, kv_size = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up = {"mlp.gate_proj": shape.intermediate_size, "mlp.up_proj": shape.intermediate_size}
    return DecoderLayer(
        input_norm=named.norm("input_layernorm", hidden, eps),
        qkv=named.linear(qkv, hidden, shape.qkv_bias),
        q_norm=named.norm("self_attn.q_norm", head_dim, eps) if shape.qk_norm else None,
        k_norm=named.norm("self_attn.k_norm", head_dim, eps) if shape.qk_norm else None,
        o=named.linear({"self_attn.o_proj": hidden}, q_size, shape.o_bias),
        post_norm=named.norm("post_attention_layernorm", hidden, eps),
        mlp=GatedMlp(
            named.linear(gate_up, hidden, shape.mlp_bias),
            named.linear({"mlp.down_proj": hidden}, shape.intermediate_size, shape.mlp_bias),
            activation(shape.hidden_act),
        ),
    )


def _refuse_leftovers(names: list[str], shape: TargetShape) -> None:
    """A tensor nobody asked for means that the network is not the one we compute."""
    harmless = ("lm_head.weight",) if shape.tie_word_embeddings else ()
    left = [name for name in names if name not in harmless and not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise ValueError(
            f"the checkpoint holds {len(left)} tensors that {shape.architecture} has no use for: {left[:4]}"
        )
