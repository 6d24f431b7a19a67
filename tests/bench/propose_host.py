"""Time of one propose on the CPU by route, batch and context: `OMP_WAIT_POLICY=PASSIVE python -m tests.bench.propose_host`.

SmolLM2 geometry (hidden 576, 9/3 heads of 64, vocabulary 49,152), a 3-layer DFlash2 drafter with
B = 8, bfloat16, random weights. Host times in milliseconds, the median of the repeats.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from draft_worker.batch import BlockBatch
from draft_worker.config import ROUTES, DraftConfig, kind_specs
from draft_worker.model import DraftModel
from draft_worker.propose import Proposer
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import ReqId
from memsvc.wire.mem import KindLayout
from memsvc.wire.text import Sampling
from tests.support.make_drafter import drafter_config

PAGE_SIZE = 16
NUM_DRAFTS = 7
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def random_model(folder: Path) -> DraftModel:
    """The drafter, from two config files and nothing else."""
    drafter = drafter_config(TARGET, selector_rank=256, sliding_window=2048, dtype="bfloat16")
    for name, config in (("target", TARGET), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    config = DraftConfig(
        run_dir="", draft_path=str(folder / "drafter"), target_path=str(folder / "target"), load_format="dummy"
    )
    return load_model(config, DraftShape.from_folder(config.draft_path))


def filled_pool(model: DraftModel, num_reqs: int, context_len: int) -> tuple[KvPool, PageTables]:
    """Requests 1..num_reqs with scattered pages of random K and V."""
    pages_per_req = -(-(context_len + NUM_DRAFTS + 1) // PAGE_SIZE)
    num_pages = 1 + num_reqs * pages_per_req
    shape = model.shape
    (spec,) = kind_specs(shape, PAGE_SIZE, "bfloat16")
    kind = KindLayout(spec.name, spec.page_bytes, PAGE_SIZE, 0, 0, 1, spec.page_bytes, num_pages)
    kv_shape = KvShape(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=model.dtype
    )
    pool = KvPool(torch.zeros(num_pages * spec.page_bytes, dtype=torch.uint8), kind, kv_shape)
    for layer in range(shape.num_layers):
        pool.k(layer).normal_()
        pool.v(layer).normal_()
    tables = PageTables(max_reqs=num_reqs, max_pages=pages_per_req, page_size=PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages)).reshape(num_reqs, pages_per_req)
    for index, row in enumerate(pages.tolist()):
        tables.add(ReqId(index + 1))
        tables.set_row(ReqId(index + 1), row)
    return pool, tables


def measure(proposer: Proposer, batch: BlockBatch, samplers: list[RowSampler], repeats: int) -> dict[str, float]:
    """Median total of some proposes, and the parts of the median one."""
    proposer.propose(batch, samplers)
    runs = []
    for _ in range(repeats):
        started = time.perf_counter()
        drafts = proposer.propose(batch, samplers)
        runs.append((time.perf_counter() - started, drafts))
    runs.sort(key=lambda run: run[0])
    drafts = runs[len(runs) // 2][1]
    return {
        "total_ms": round(statistics.median(total for total, _ in runs) * 1e3, 2),
        "least_ms": round(runs[0][0] * 1e3, 2),
        "fwd_ms": round(drafts.fwd_us / 1e3, 2),
        "head_ms": round(drafts.head_us / 1e3, 2),
        "select_ms": round(drafts.select_us / 1e3, 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.propose_host", description=__doc__)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=["paged"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=512, help="tokens of every request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder))
    pool, tables = filled_pool(model, max(args.requests), args.context)
    sampling = Sampling(seed=1, max_tokens=9, temperature=args.temperature)
    everyone = BlockBatch(
        rows=np.arange(1, max(args.requests) + 1),
        anchors=np.arange(max(args.requests)),
        anchor_pos=np.full(max(args.requests), args.context),
        context_start=np.zeros(max(args.requests), dtype=np.int64),
        num_drafts=NUM_DRAFTS,
    )
    for num in args.requests:
        batch = replace(everyone, **{name: getattr(everyone, name)[:num] for name in
                                     ("rows", "anchors", "anchor_pos", "context_start")})  # fmt: skip
        samplers = [RowSampler(sampling, eos_ids=[], prompt=[1] * args.context, output=[2]) for _ in range(num)]
        for route in args.routes:
            proposer = Proposer(model, pool, tables, route)
            result = measure(proposer, batch, samplers, args.repeats)
            print(json.dumps({"route": route, "requests": num, "context": args.context} | result), flush=True)


if __name__ == "__main__":
    main()
