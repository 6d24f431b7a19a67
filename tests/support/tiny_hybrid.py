"""Tiny random hybrid targets made with transformers, and requests over one small poisoned arena."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from memsvc.core.config import PoolConfig
from memsvc.core.geometry import make_layout, solve
from memsvc.device.kv_dtype import AUTO
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker.linear_memory import LinearMemory
from target_worker.model.config import kind_specs
from target_worker.model.weights import load_target
from target_worker.runner import Runner, Segment
from tests.support.tiny_target import page_dtype

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MAX_REQS = 40
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}


SMALLER = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 61, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
"""Overrides for kernels that are interpreted."""


def make_hybrid(folder: Path, *, family: str = "Qwen3_5", nested: bool = False, **overrides: Any) -> Any:
    """Save a random hybrid and return it, float32, the oracle. nested: as the text part of a model with vision."""
    torch.manual_seed(11)
    if nested:
        text = {**SIZES, **overrides}
        config = transformers.Qwen3_5Config(
            text_config=text, vision_config=VISION, tie_word_embeddings=text.get("tie_word_embeddings", False)
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    else:
        name = f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config"
        config = getattr(transformers, name)(**{**SIZES, **overrides})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # from slow to fast forgetting
                parameter.copy_(torch.linspace(-4, 1, parameter.numel()).view_as(parameter))
                continue
            # Norms and the step's bias start as constants, which would hide mistakes.
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.08))
            if "conv1d" in name:
                parameter.mul_(3)
        model.get_input_embeddings().weight.mul_(20)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


class Frames:
    """Hands out pages of every kind from one arena: a frame belongs to a kind as long as a page of it is out."""

    def __init__(self, kinds: list[KindLayout], num_frames: int) -> None:
        order = torch.randperm(num_frames - 1, generator=torch.Generator().manual_seed(5)) + 1
        self.kinds = {kind.name: kind for kind in kinds}
        self.empty = [int(frame) for frame in order]
        self.free: dict[str, list[PageId]] = {kind.name: [] for kind in kinds}

    def take(self, kind: str, num: int) -> list[PageId]:
        """Pages that nobody holds."""
        while len(self.free[kind]) < num:
            per_frame, frame = self.kinds[kind].pages_per_frame, self.empty.pop()
            self.free[kind].extend(PageId(frame * per_frame + i) for i in range(per_frame))
        return [self.free[kind].pop() for _ in range(num)]


@dataclass
class HybridReq:
    """One request as its worker knows it."""

    rid: int
    row: int
    tokens: list[int] = field(default_factory=list)
    """Computed and final."""
    state_len: int = 0


class HybridRig:
    """A hybrid target over one arena in which every byte is NaN until it is written."""

    page_size = 4

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        block: int = 5,
        num_frames: int = 400,
        taps: Iterable[int] = (),
        quantization: str = "",
        kv: str = AUTO,
        states: str = "float32",
    ) -> None:
        """kv: one of KV_CACHE_DTYPES, states: of STATE_DTYPES."""
        self.model, self.shape = load_target(folder, dtype, quantization=quantization)
        self.block = block
        kinds = kind_specs(self.shape, self.page_size, dtype, block, kv, states)
        geometry = solve(kinds)
        pool = PoolConfig(arena_bytes=num_frames * geometry.frame_bytes, page_size=self.page_size, kinds=kinds)
        self.layout = layout = make_layout(pool, geometry)
        self.arena = torch.full((layout.arena_bytes,), 0xFF, dtype=torch.uint8)
        self.frame_bytes = layout.frame_bytes
        self.frames = Frames(layout.kinds, layout.num_frames)
        linear = LinearMemory.of_layout(
            self.arena, layout, self.model, max_reqs=MAX_REQS, block_size=block, state_dtype=states
        )
        assert linear is not None
        self.linear = linear
        kv_shape = KvShape(
            num_layers=self.shape.num_full_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=page_dtype(kv, self.model.dtype),
        )
        self.tables = PageTables(max_reqs=MAX_REQS, max_pages=90, page_size=self.page_size)
        taps = list(taps)
        self.features = torch.zeros((256, len(taps) * self.shape.hidden_size), dtype=self.model.dtype)
        self.runner = Runner(
            self.model,
            KvPool(self.arena, layout.kinds[0], kv_shape),
            self.tables,
            self.features if taps else None,
            taps,
            self.linear,
        )

    def open(self, rid: int, num_tokens: int, hit: "HybridReq | None" = None) -> HybridReq:
        """A request with pages for num_tokens. hit: a request with an aligned state; its prefix up to there is shared."""
        row, num_layers = self.tables.add(ReqId(rid)), self.linear.table.num_layers
        shared: list[PageId] = []
        state_in: list[PageId] = []
        req = HybridReq(rid, row)
        if hit is not None:
            req.state_len, req.tokens = hit.state_len, hit.tokens[: hit.state_len]
            shared = [PageId(p) for p in self.tables.table[hit.row, : hit.state_len // self.page_size].tolist()]
            state_in = self.frozen(hit)
        own = self.frames.take("target_kv", -(-num_tokens // self.page_size) - len(shared))
        self.tables.set_row(ReqId(rid), shared + own)
        self.linear.table.open(
            row,
            state_out=self.frames.take("state", num_layers),
            ring=self.frames.take("ring", self.linear.table.ring[row].size),
            state_in=state_in,
        )
        return req

    def close(self, req: HybridReq, *, poison: bool) -> None:
        """Give state and ring back, NaN in every byte if so wished. Pages that others may use are kept."""
        table = self.linear.table
        own = {"ring": table.ring[req.row].flatten().tolist(), "state": table.state_out[req.row].tolist()}
        for kind, pages in own.items():
            stride = self.frames.kinds[kind].stride_bytes
            for page in pages:
                if poison:
                    self.arena[page * stride : (page + 1) * stride] = 0xFF
            self.frames.free[kind].extend(PageId(page) for page in pages)
        table.close(req.row)
        self.tables.remove(ReqId(req.rid))

    def frozen(self, req: HybridReq) -> list[PageId]:
        """The pages of the state on which req stands; it goes on with new ones."""
        assert req.state_len, "the state before the first token has no pages"
        table = self.linear.table
        pages = [PageId(page) for page in table.state_in[req.row].tolist()]
        table.freeze(req.row, self.frames.take("state", table.num_layers))
        return pages

    def segment(self, req: HybridReq, tokens: list[int], *, certain: int, logits: int | None = None) -> Segment:
        """The next rows of a request."""
        wanted = len(tokens) if logits is None else logits
        return Segment(req.row, len(req.tokens), tokens, wanted, req.state_len, certain)

    def forward(self, segments: list[Segment], final: dict[int, tuple[HybridReq, int]]) -> torch.Tensor:
        """Run; final: by place in segments, the request and how many of its rows are final."""
        got = self.runner.forward(segments)
        for i, (req, num) in final.items():
            self.moved(req, segments[i])
            req.tokens = req.tokens + segments[i].token_ids[:num]
        return got.float()

    def moved(self, req: HybridReq, segment: Segment) -> None:
        """Book where the state stands now."""
        write_len = segment.write_len(self.page_size)
        if write_len > req.state_len:
            self.linear.table.wrote(req.row)
            req.state_len = write_len

    def chunk(self, req: HybridReq, tokens: list[int]) -> torch.Tensor:
        """Logits of a prompt chunk."""
        return self.forward([self.segment(req, tokens, certain=len(tokens))], {0: (req, len(tokens))})

    def verify(self, req: HybridReq, block: list[int], num: int) -> torch.Tensor:
        """Logits of a block of which num rows become final."""
        return self.forward([self.segment(req, block, certain=1)], {0: (req, num)})

    def catch_up(self, req: HybridReq) -> None:
        """Bring the state to the last page edge."""
        segment = self.segment(req, [], certain=0)
        self.runner.catch_up([segment])
        self.moved(req, segment)
