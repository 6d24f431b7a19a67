"""The frozen target in training: features of whole sequences, and its distributions at drafted rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_worker.train.delta import WholeSequences
from target_worker.model.decoder import Decoder
from target_worker.train.fused import Fused

_CHUNK = 8192
"""Rows whose logits over the whole vocabulary are held at a time."""


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """A target without memory: every call computes whole sequences."""

    model: Decoder
    taps: tuple[int, ...]

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [n * T, taps * hidden] and last hidden states [n * T, hidden] of tokens int64 [n, T]."""
        n, num_tokens = tokens.shape
        model, width = self.model, self.model.shape.hidden_size
        features = torch.empty((n * num_tokens, len(self.taps) * width), dtype=model.dtype, device=model.device)

        def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.reshape(n, num_tokens, -1, part.shape[-1]) for part in (q, k, v))
            return causal_attention(q, k, v)

        def tap(layer: int, x: torch.Tensor) -> None:
            for place, tapped in enumerate(self.taps):
                if tapped == layer:
                    features[:, place * width : (place + 1) * width] = x

        positions = torch.arange(num_tokens, device=model.device).repeat(n)
        spec = model.shape.linear
        recur = None if spec is None else WholeSequences(spec, n).recur
        return features, model.hidden(tokens.flatten(), positions, attend, tap=tap, recur=recur)

    @torch.no_grad()
    def probabilities(self, hidden: torch.Tensor, token_ids: torch.Tensor | None, temperature: float) -> torch.Tensor:
        """float32 [m, ids]: probability of each of token_ids (None: of all) after hidden states [m, hidden].

        Normalised over the whole vocabulary, so a row of fewer ids sums to less than 1.
        """
        pieces = hidden.split(_CHUNK)
        return torch.cat([_fused_shares(self.model.logits(piece), token_ids, temperature) for piece in pieces])


def shares(logits: torch.Tensor, token_ids: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """float32 [m, ids]: softmax of logits [m, vocab], of which some columns are wanted."""
    scaled = logits.float() / temperature
    wanted = scaled if token_ids is None else scaled[:, token_ids]
    return torch.exp(wanted - scaled.logsumexp(1, keepdim=True))


_fused_shares = Fused(shares, moving=1, frozen=True)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[n * T, heads * d]: n sequences from position 0 on; q [n, T, heads, d], k and v [n, T, kv_heads, d]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)
