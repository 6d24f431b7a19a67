"""What the training of the embedded hybrid model can be told. Every field is a flag of the command that takes it."""

from dataclasses import dataclass
from typing import Any

from target_worker.model.linear_spec import FULL, LINEAR
from target_worker.train.run_config import MUON, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """A Qwen3.5-style hybrid: gated delta net layers, and gated attention in every fourth."""

    vocab: int = 8192
    """Rows of the embedding, which is the head too."""
    hidden: int = 256
    """Width of the residual stream."""
    mlp_width: int = 768
    """Width of the gated MLPs."""
    layers: int = 8
    """Layers of both kinds."""
    interval: int = 4
    """The last of so many layers attends."""
    heads: int = 4
    """Query heads of attention."""
    kv_heads: int = 2
    """Its heads of keys and values."""
    head_dim: int = 64
    """Width of each of them."""
    linear_k_heads: int = 4
    """Query and key heads of a gated delta net."""
    linear_v_heads: int = 4
    """Its value heads, each with a state."""
    linear_dim: int = 64
    """Width of each of its heads: a state is linear_dim x linear_dim."""
    conv_kernel: int = 4
    """Rows that its convolution sees."""
    rotary_share: float = 0.5
    """Part of head_dim that is rotated."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    positions: int = 2048
    """Longest context, and the length of a training sequence."""
    norm_eps: float = 1e-6
    """Epsilon of the norms."""

    def __post_init__(self) -> None:
        if self.layers % self.interval:
            raise ValueError(f"--layers {self.layers} is not a multiple of --interval {self.interval}")
        for many, few in (("heads", "kv_heads"), ("linear_v_heads", "linear_k_heads")):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{getattr(self, many)} {many} are not a multiple of {getattr(self, few)} {few}")
        if self.rotary_dim % 2:
            raise ValueError(
                f"--rotary-share {self.rotary_share} of {self.head_dim} is {self.rotary_dim}, an odd width"
            )

    @property
    def rotary_dim(self) -> int:
        """Rotated part of a head of attention."""
        return int(self.head_dim * self.rotary_share)

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return (2 * self.linear_k_heads + self.linear_v_heads) * self.linear_dim

    def is_full(self, layer: int) -> bool:
        """The layer attends."""
        return (layer + 1) % self.interval == 0

    def to_json(self, eos_id: int, dtype: str) -> dict[str, Any]:
        """config.json of a Hugging Face folder, weights in dtype."""
        third = self.rotary_dim // 6
        return {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": dtype,
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "hidden_act": "silu", "rms_norm_eps": self.norm_eps,
            "layer_types": [FULL if self.is_full(layer) else LINEAR for layer in range(self.layers)],
            "linear_num_key_heads": self.linear_k_heads, "linear_num_value_heads": self.linear_v_heads,
            "linear_key_head_dim": self.linear_dim, "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": self.conv_kernel, "max_position_embeddings": self.positions,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_share,
                "mrope_section": [self.rotary_dim // 2 - 2 * third, third, third], "mrope_interleaved": True,
            },
            "tie_word_embeddings": True, "attention_bias": False, "attn_output_gate": True,
            "bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": eos_id,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(RunConfig):
    """How to train it."""

    fit_seconds: float = 600.0
    """Where steps is 0 the first slice measures its speed and fixes the steps that fit into so many seconds in all."""
    sequences_per_step: int = 32
    """Sequences of --positions tokens in a step."""
    optimizer: str = MUON
    """Of matrices: adamw or muon; the embedding, norms, gates and convolutions have AdamW."""
    lr: float = 4e-3
    """Peak learning rate."""
    weight_decay: float = 0.05
    """On matrices; the rest has none."""
    eval_every: int = 500
    """Steps between measurements of the held-out loss; one more stands at the end of each slice."""
    eval_sequences: int = 128
    """Held-out sequences, the first ones."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # super() knows the class before it got its slots
        self._check_counts("sequences_per_step", "eval_sequences")
        if not self.steps and self.fit_seconds <= 0:
            raise ValueError(f"--steps is 0, so --fit-seconds, {self.fit_seconds}, must be above 0")
