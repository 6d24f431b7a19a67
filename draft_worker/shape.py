"""What a drafter is, as its config.json says it. No torch here: launch imports this file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_worker.config_json import ConfigJson
from memsvc.device.hf_config import RopeSpec, read_config

DEFAULT_MASK_TOKEN = "<|MASK|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """Who sees whom in one draft layer."""

    window: int
    """Keys a row sees: its own position and window - 1 before it. 0 = all."""
    causal: bool
    """A block row sees no later block row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftShape:
    """A DFlash or DFlash2 drafter's config, every spelling resolved. Tensor sizes follow from it alone."""

    hidden_size: int
    """H, also the width of the target's embedding and head."""
    intermediate_size: int
    """MLP width."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """d, the same for Q, K and V."""
    layers: tuple[LayerAttention, ...]
    """One entry per draft layer."""
    rms_norm_eps: float
    """Epsilon of every norm."""
    vocab_size: int
    """V, the target's vocabulary."""
    draft_vocab_size: int
    """Rows of the head; vocab_size unless the drafter has a reduced vocabulary (d2t)."""
    max_position_embeddings: int
    """Longest context it was made for."""
    attention_bias: bool
    """q, k, v and o projections have a bias."""
    rope: RopeSpec
    """Rotary embedding of the drafter's own heads."""
    is_neox: bool
    """Rotated pairs are the two halves of a head; otherwise neighbours."""
    block_size: int
    """B as trained: the anchor and B - 1 drafts."""
    mask_token_id: int
    """Row of the target's embedding under rows 1 and on; -1 if only mask_token names it."""
    mask_token: str
    """The mask token's text, looked up in the target's tokenizer when mask_token_id is -1."""
    target_layer_ids: tuple[int, ...]
    """Target layers whose outputs are the features, in concatenation order."""
    num_target_layers: int
    """Depth of the target; 0 if the config does not say."""
    target_hidden_size: int
    """Width of one tap."""
    conv_kernel_size: int
    """S: taps of the local convolution; 0 = no convolution (v1)."""
    conv_group_size: int
    """g: channels that share a dynamic tap."""
    selector_rank: int
    """R: rank of the candidate selector; 0 = no selector (v1)."""
    selector_top_k: int
    """K: candidates per row."""
    attention_sink_bias: bool
    """Each head has a learned logit that takes attention to nothing."""
    attention_value_scale: float
    """Every V is multiplied by it."""
    input_embedding_scale: float
    """Factor on the target's embedding rows."""
    output_multiplier: float
    """Factor on the head's logits."""
    final_logit_softcapping: float
    """c of c * tanh(logit / c); 0 = off."""
    dtype: str
    """Of the weights as stored, torch's name; empty if the config does not say."""

    @classmethod
    def from_folder(cls, path: str | Path) -> "DraftShape":
        """Read config.json of a drafter folder. Raises ValueError that names the key and its value."""
        raw = read_config(Path(path))
        try:
            return cls.from_json(raw)
        except ValueError as error:
            raise ValueError(f"{Path(path) / 'config.json'}: {error}") from None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DraftShape":
        """The shape that a parsed config.json describes. Raises ValueError that names the key."""
        config = ConfigJson(raw)
        config.refuse_other_methods()
        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads")
        head_dim = config.integer("head_dim", hidden_size // max(1, num_heads))
        vocab_size = config.integer("vocab_size")
        shape = cls(
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            layers=tuple(LayerAttention(window=window, causal=causal) for window, causal in config.layers()),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            vocab_size=vocab_size,
            draft_vocab_size=config.integer("draft_vocab_size", vocab_size),
            max_position_embeddings=config.integer("max_position_embeddings", 1 << 30),
            attention_bias=config.flag("attention_bias"),
            rope=config.rope(head_dim),
            is_neox=config.is_neox,
            block_size=config.integer("block_size", 16),
            mask_token_id=config.integer("mask_token_id", -1, least=-1),
            mask_token=config.text("mask_token", DEFAULT_MASK_TOKEN),
            target_layer_ids=config.target_layer_ids(),
            num_target_layers=config.integer("num_target_layers", 0, least=0),
            target_hidden_size=config.integer("target_hidden_size", hidden_size),
            conv_kernel_size=config.integer("conv_kernel_size", 0, least=0),
            conv_group_size=config.integer("conv_group_size", 0, least=0),
            selector_rank=config.integer("selector_rank", 0, least=0),
            selector_top_k=config.integer("selector_top_k", 0, least=0),
            attention_sink_bias=config.flag("attention_sink_bias"),
            attention_value_scale=config.number("attention_value_scale", 1.0),
            input_embedding_scale=config.number("input_embedding_scale", 1.0),
            output_multiplier=config.number("output_multiplier", 1.0),
            final_logit_softcapping=config.number("final_logit_softcapping", 0.0),
            dtype=config.text("dtype", config.text("torch_dtype", "")),
        )
        shape._check(config.architecture)
        return shape

    def _check(self, architecture: str) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}, the anchor and one draft need 2")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                raise ValueError(
                    f"{one} is {getattr(self, one)} and {other} is {getattr(self, other)}: both or neither"
                )
        if architecture.startswith("DFlash2") and not (self.has_conv and self.has_selector):
            raise ValueError(f"architecture {architecture} needs conv_* and selector_* sizes in dflash_config")
        if self.has_conv and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size {self.conv_group_size}"
            )
        if not self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.selector_top_k > self.draft_vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} exceeds the vocabulary of {self.draft_vocab_size}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside vocab_size {self.vocab_size}")
        if self.output_multiplier <= 0 or self.final_logit_softcapping < 0:
            raise ValueError(
                f"output_multiplier {self.output_multiplier} must be > 0"
                f" and final_logit_softcapping {self.final_logit_softcapping} >= 0"
            )

    @property
    def num_layers(self) -> int:
        """L, draft layers."""
        return len(self.layers)

    @property
    def has_conv(self) -> bool:
        """Local convolutions stand around attention and MLP (v2)."""
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        """Tokens are chosen by the candidate selector (v2)."""
        return self.selector_rank > 0

    @property
    def feature_width(self) -> int:
        """Numbers in the features of one token: all taps, side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def window(self) -> int:
        """Tokens of context that any layer reads, 0 for all of them."""
        windows = [layer.window for layer in self.layers]
        return max(windows) if all(windows) else 0
