"""DFlash and DFlash2 written straight from the formulas: one request, no paging, no batching, float32, loops.

Shares no code with draft_worker. Reads configs in the published layout only.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

Pick = Callable[[int, list[float], list[int]], int]
"""(row j from 1, scores of the candidates, their ids) -> index of the chosen one."""


def pick_first_best(_row: int, scores: list[float], _ids: list[int]) -> int:
    """Greedy."""
    return scores.index(max(scores))


class DFlashOracle:
    """A drafter as functions of dense tensors. tensors: names of the published layout."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
        mask_row: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.flash = config["dflash_config"]
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.embedding = embedding.float()
        self.head = head.float()
        self.kept: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        """What pages make of a context token's K or V. A block's own are in none."""
        self.mask_row = self.embedding[self.flash["mask_token_id"]] if mask_row is None else mask_row.float()

    def setting(self, key: str, default: Any) -> Any:
        return self.flash.get(key, self.config.get(key, default))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rope(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [heads, d] turned to a position, pair by pair."""
        dim = x.shape[-1]
        rotary = int(dim * self.setting("partial_rotary_factor", 1.0))
        out = x.clone()
        for pair in range(rotary // 2):
            neox = self.setting("is_neox_style", True)
            one, other = (pair, pair + rotary // 2) if neox else (2 * pair, 2 * pair + 1)
            angle = torch.tensor(position / self.config["rope_theta"] ** (2 * pair / rotary))
            out[:, one] = x[:, one] * angle.cos() - x[:, other] * angle.sin()
            out[:, other] = x[:, other] * angle.cos() + x[:, one] * angle.sin()
        return out

    def context_vector(self, feature: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(feature, "fc"), self.tensors["hidden_norm.weight"])

    def key_value(self, layer: int, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [kv_heads, d] of one row."""
        name = f"layers.{layer}.self_attn."
        heads = (self.config["num_key_value_heads"], self.config["head_dim"])
        k = self.norm(self.linear(x, f"{name}k_proj").view(heads), self.tensors[f"{name}k_norm.weight"])
        v = self.linear(x, f"{name}v_proj").view(heads) * self.setting("attention_value_scale", 1.0)
        return self.rope(k, position), v

    def context_kv(self, feature: torch.Tensor, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of one context token in every layer."""
        c = self.context_vector(feature)
        rows = [self.key_value(layer, c, position) for layer in range(self.config["num_hidden_layers"])]
        return [(self.kept(k), self.kept(v)) for k, v in rows]

    def sees(self, layer: int, query: int, key: int, anchor_pos: int) -> bool:
        """Positions: does the block row at `query` see the key at `key`?"""
        types = self.config.get("layer_types")
        sliding = types is not None and types[layer] == "sliding_attention"
        window = self.config["sliding_window"] if sliding else None
        causal = self.config.get("is_causal", self.flash.get("causal", sliding))
        if window is not None and not (query - key < window and key - query < window):
            return False
        return key < anchor_pos or not causal or key <= query

    def attention(self, layer: int, u: torch.Tensor, anchor_pos: int, context: list[Any]) -> torch.Tensor:
        """u [B, H]. context: (position, [(K, V) of each layer])."""
        name = f"layers.{layer}.self_attn."
        num_heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        group = num_heads // self.config["num_key_value_heads"]
        keys = [(position, *layers[layer]) for position, layers in context]
        keys += [(anchor_pos + j, *self.key_value(layer, row, anchor_pos + j)) for j, row in enumerate(u)]
        sinks = self.tensors.get(f"{name}attention_sink_bias")
        rows = []
        for j, row in enumerate(u):
            q = self.norm(self.linear(row, f"{name}q_proj").view(num_heads, dim), self.tensors[f"{name}q_norm.weight"])
            q = self.rope(q, anchor_pos + j)
            seen = [(k, v) for position, k, v in keys if self.sees(layer, anchor_pos + j, position, anchor_pos)]
            heads = []
            for head in range(num_heads):
                logits = torch.stack([q[head] @ k[head // group] for k, _ in seen]) / math.sqrt(dim)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1]])
                weights = torch.softmax(logits, 0)[: len(seen)]
                heads.append(sum(w * v[head // group] for w, (_, v) in zip(weights, seen, strict=True)))
            rows.append(self.linear(torch.cat(heads), f"{name}o_proj"))
        return torch.stack(rows)

    def mlp(self, layer: int, u: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.mlp."
        gate = self.linear(u, f"{name}gate_proj")
        return self.linear(gate / (1 + torch.exp(-gate)) * self.linear(u, f"{name}up_proj"), f"{name}down_proj")

    def dynamic_taps(self, name: str, u: torch.Tensor) -> torch.Tensor:
        """D [B, side, tap, group] of a sublayer's input."""
        taps = self.flash["conv_kernel_size"]
        flat = u @ self.tensors[f"{name}.kernel_projection.weight"].T
        return flat.view(len(u), 2, taps, u.shape[1] // self.flash["conv_group_size"])

    def convolve(self, name: str, side: int, x: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        base = self.tensors[f"{name}.base_kernel"]
        group = self.flash["conv_group_size"]
        out = torch.zeros_like(x)
        for j in range(len(x)):
            for tap in range(min(self.flash["conv_kernel_size"], j + 1)):
                spread = dynamic[j, side, tap].repeat_interleave(group)
                out[j] += (base[side, tap] + spread) * x[j - tap]
        return out

    def sublayer(self, name: str, u: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if "conv_kernel_size" not in self.flash:
            return run(u)
        dynamic = self.dynamic_taps(name, u)
        return self.convolve(name, 1, run(self.convolve(name, 0, u, dynamic)), dynamic)

    def rows(self, context: list[Any], anchor: int, anchor_pos: int, num_drafts: int) -> torch.Tensor:
        """Final-normed rows [1 + num_drafts, H]."""
        scale = self.setting("input_embedding_scale", 1.0)
        x = torch.stack([self.embedding[anchor]] + [self.mask_row] * num_drafts) * scale
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}."
            u = self.norm(x, self.tensors[f"{name}input_layernorm.weight"])
            x = x + self.sublayer(
                f"{name}attention_conv", u, lambda y, at=layer: self.attention(at, y, anchor_pos, context)
            )
            u = self.norm(x, self.tensors[f"{name}post_attention_layernorm.weight"])
            x = x + self.sublayer(f"{name}mlp_conv", u, lambda y, at=layer: self.mlp(at, y))
        return self.norm(x, self.tensors["norm.weight"])

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = rows @ self.head.T * self.setting("output_multiplier", 1.0)
        cap = self.setting("final_logit_softcapping", 0.0)
        return cap * torch.tanh(logits / cap) if cap else logits

    def propose(
        self,
        features: dict[int, torch.Tensor],
        anchor: int,
        anchor_pos: int,
        num_drafts: int,
        pick: Pick = pick_first_best,
    ) -> list[int]:
        """Drafts after an anchor. features: by position, those that may be read."""
        context = [(position, self.context_kv(feature, position)) for position, feature in sorted(features.items())]
        z = self.rows(context, anchor, anchor_pos, num_drafts)[1:]
        return self.choose(z, self.logits(z), anchor, pick)

    def choose(self, z: torch.Tensor, logits: torch.Tensor, anchor: int, pick: Pick) -> list[int]:
        """Left to right: the selector's walk, or each row by itself. 16 candidates where there is no selector."""
        before, tokens = anchor, []
        for j, (row, values) in enumerate(zip(z, logits, strict=True), start=1):
            order = sorted(range(len(values)), key=lambda token: (-float(values[token]), token))
            ids = order[: self.flash.get("selector_top_k", 16)]
            scores = [float(values[token]) for token in ids]
            if "selector_rank" in self.flash:
                scores = [value + self.transition(row, before, token) for value, token in zip(scores, ids, strict=True)]
            before = ids[pick(j, scores, ids)]
            tokens.append(before)
        return tokens

    def transition(self, row: torch.Tensor, before: int, token: int) -> float:
        name = "candidate_selector."
        hidden = self.tensors[f"{name}hidden_projection.weight"] @ row
        predecessor = self.tensors[f"{name}predecessor_codebook"][before]
        return float((predecessor * hidden * self.tensors[f"{name}successor_codebook"][token]).sum())
