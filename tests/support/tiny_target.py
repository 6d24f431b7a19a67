"""Tiny random targets made with transformers, and a runner over a small poisoned pool."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from memsvc.device.kv_dtype import AUTO, kv_torch_name
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker.model.config import kind_specs
from target_worker.model.weights import load_target
from target_worker.runner import Runner, Segment

FAMILIES = ("Llama", "Qwen2", "Qwen3")

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_target(folder: Path, family: str, *, shard: str = "1GB", **overrides: Any) -> Any:
    """Save a random model of the family and return it, float32, the oracle."""
    dtype = overrides.pop("dtype", torch.float32)
    config = getattr(transformers, f"{family}Config")(**_SIZES | overrides)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.model.embed_tokens.weight.mul_(20)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


class TargetRig:
    """A target of a folder over its own arena: every byte NaN until written, pages in no order, stride > page."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        num_pages: int = 160,
        taps: Iterable[int] = (),
        quantization: str = "",
        kv: str = AUTO,
    ) -> None:
        """kv: one of KV_CACHE_DTYPES."""
        self.model, self.shape = load_target(folder, dtype, quantization=quantization)
        self.page_size = 4
        (spec,) = kind_specs(self.shape, self.page_size, dtype, kv_cache_dtype=kv)
        kind = KindLayout(
            name=spec.name,
            page_bytes=spec.page_bytes,
            tokens_per_page=self.page_size,
            pages_per_req=0,
            window=0,
            pages_per_frame=3,
            stride_bytes=-(-spec.page_bytes // 256) * 256 + 256,
            num_pages=num_pages,
        )
        self.arena = torch.full((kind.num_pages * kind.stride_bytes,), 0xFF, dtype=torch.uint8)
        shape = KvShape(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=page_dtype(kv, self.model.dtype),
        )
        self.pool = KvPool(self.arena, kind, shape)
        self.tables = PageTables(max_reqs=8, max_pages=90, page_size=self.page_size)
        taps = list(taps)
        self.features = torch.zeros((256, len(taps) * self.shape.hidden_size), dtype=self.model.dtype)
        self.runner = Runner(self.model, self.pool, self.tables, self.features if taps else None, taps)
        order = torch.randperm(num_pages - 3, generator=torch.Generator().manual_seed(3)) + 3
        self.free = [PageId(int(page)) for page in order]

    def open(self, rid: int, num_tokens: int) -> int:
        """A request with pages for num_tokens; its row."""
        row = self.tables.add(ReqId(rid))
        num = -(-num_tokens // self.page_size)
        self.tables.set_row(ReqId(rid), [self.free.pop() for _ in range(num)])
        return row

    def close(self, rid: int) -> None:
        """Give the pages back, dirty as they are."""
        row = self.tables.table[self.tables.row(ReqId(rid))].tolist()
        self.free.extend(PageId(page) for page in row if page)
        self.tables.remove(ReqId(rid))

    def logits(self, row: int, token_ids: list[int], chunk: int = 0) -> torch.Tensor:
        """Logits of all tokens from position 0, computed `chunk` tokens at a time (0: at once)."""
        chunk = chunk or len(token_ids)
        parts = []
        for start in range(0, len(token_ids), chunk):
            piece = token_ids[start : start + chunk]
            parts.append(self.runner.forward([Segment(row, start, piece, len(piece))]))
        return torch.cat(parts).float()


def page_dtype(kv: str, dtype: torch.dtype) -> torch.dtype:
    """Of pages, for a model that computes in dtype. kv: one of KV_CACHE_DTYPES."""
    return getattr(torch, kv_torch_name(kv, str(dtype).removeprefix("torch.")))


def tokens_of(seed: int, num: int, vocab: int = 97) -> list[int]:
    """Token ids by seed, none of them special."""
    return torch.randint(3, vocab, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [len, vocab] from transformers, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()
