"""DFlash2's candidate selector: re-ranks a row's best tokens by the token that was picked before it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """score_t(p -> c) = unary[t, c] + sum over r of predecessor[p, r] * (hidden_projection z_t)[r] * successor[c, r]."""

    hidden_projection: torch.Tensor
    """[R, H]"""
    predecessor: torch.Tensor
    """[V, R]"""
    successor: torch.Tensor
    """[V, R]"""

    def lattice(self, z: torch.Tensor, anchors: torch.Tensor, unary: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Scores of every candidate after every candidate of the row before: fp32 [n, k, K before, K].

        z [n, k, H] final-normed rows 1..k; anchors [n]; unary fp32 and ids [n, k, K]: the rows' best
        logits. Before row 1 stands the anchor, whose scores fill all K places of that row.
        """
        r = F.linear(z, self.hidden_projection).float()
        before = torch.cat([anchors[:, None, None].expand(-1, 1, ids.shape[2]), ids[:, :-1]], dim=1)
        queries = F.embedding(before, self.predecessor).float().mul_(r[:, :, None])
        keys = F.embedding(ids, self.successor).float()
        return (queries @ keys.transpose(2, 3)).add_(unary[:, :, None])
