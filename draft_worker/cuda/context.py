"""Draft KV of tokens, from their features: one projection for K and V of all layers, and one kernel behind it."""

import torch

from draft_worker.model import DraftModel
from memsvc.device.kernels.context_write import ContextRows, ContextSpec, write_context_kv
from memsvc.device.kernels.norm import rms_norm
from memsvc.device.kernels.places import TokenRows
from memsvc.device.kv_pool import KvPool
from memsvc.device.linear import linear, product


def write_features(model: DraftModel, pool: KvPool, features: torch.Tensor, rows: ContextRows | TokenRows) -> None:
    """K and V of all layers for features [n, T * target hidden] of any dtype, at the places of `rows`."""
    shape = model.shape
    c = rms_norm(product(features.to(model.dtype), model.feature_proj), model.feature_norm)
    kv = linear(c, model.context_kv).view(len(c), shape.num_layers, 2, shape.num_kv_heads, shape.head_dim)
    spec = ContextSpec(k_norm=model.context_k_norm, rotary=model.rotary, value_scale=shape.attention_value_scale)
    write_context_kv(kv, spec, pool, rows)
