"""Random loads through the scheduler of a CUDA engine: the texts with prompts in graphs are those without."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

pytest.importorskip("triton", reason="triton is not installed")

from launch.config import LaunchConfig
from launch.models import read_models
from launch.planner import make_plan
from launch.specs import Run
from memsvc.core.manager import MemoryManager
from memsvc.wire.base import FinishReason, ReqId, pack_tokens
from memsvc.wire.text import Abort, Admit, Sampling
from target_worker import step_sizes
from target_worker.config import TargetConfig
from target_worker.cuda.assembly import CudaEngine
from target_worker.cuda.order import Chunk
from target_worker.cuda.prompt_graphs import PromptGraphs
from target_worker.cuda.prompts import PromptStep
from target_worker.model.weights import load_target
from tests.support.make_drafter import V1, make_drafter
from tests.support.tiny_target import make_target
from tests.support.toy_server import ToyClient, ToyText
from tests.unit.launch.test_device_plan import CARD
from tests.unit.target_worker.test_cuda_assembly import HostEngine, ToyBase

VOCAB = 40
NUM_REQS = 6
PREFIXES = ([5, 9, 11, 30, 3, 8, 8, 21, 4], [21, 17, 2, 2, 39, 1, 0, 12])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a target and its drafter."""
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    make_target(target, "Llama", num_hidden_layers=1, **sizes)
    make_drafter(drafter, target, V1, num_hidden_layers=1, block_size=2, target_layer_ids=[0])
    return target, drafter


@contextmanager
def serving(folders: tuple[Path, Path], run_dir: Path, device: str, **changes: object) -> Iterator[CudaEngine]:
    """An engine as launch starts it, whose draft never comes."""
    config = LaunchConfig(**{
        "model_path": str(folders[0]), "draft_model_path": str(folders[1]), "device": "cuda", "dtype": "float32",
        "page_size": 4, "num_drafts": 1, "max_running_requests": 3, "max_prefill_tokens": 12, "context_len": 40,
        "mem_bytes": 1 << 22,
    } | changes)  # fmt: skip
    models = read_models(config, folders[0])
    pool, plan = make_plan(config, models, card=replace(CARD, unit=1 << 12))
    run_dir.mkdir()
    Run(
        config=config, model_path=folders[0], models=models, pool=pool, plan=plan, run_dir=run_dir,
        listener=None, command=(),  # type: ignore[arg-type]
    ).spec("target", 1)  # fmt: skip
    client = ToyClient(MemoryManager(pool), "main")
    ToyBase.texts, ToyBase.draft = ToyText(), None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    base = ToyBase(
        config=msgspec.json.decode((run_dir / "target.json").read_bytes(), type=TargetConfig), run_dir=run_dir,
        context=context, client=client, registered=client.registered,  # type: ignore[arg-type]
        arena=torch.full((pool.arena_bytes,), 0xFF, dtype=torch.uint8, device=device),
        model=load_target(folders[0], "float32", device)[0],
    )  # fmt: skip
    engine = CudaEngine(base) if device == "cuda" else HostEngine(base)
    yield engine
    engine.close()
    context.destroy(linger=0)
    ToyBase.links.clear()


def texts_of(engine: CudaEngine, seed: int) -> dict[int, list[int]]:
    """The answers to a load of requests that were not aborted."""
    rng, texts = random.Random(seed), ToyBase.texts
    for rid in range(1, NUM_REQS + 1):
        prompt = [*PREFIXES[rid % 2][: rng.randrange(10)], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14)))]
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.1]), top_p=rng.choice([1.0, 0.7]), seed=rid, max_tokens=rng.randrange(1, 5),
            ignore_eos=True,
        )  # fmt: skip
        texts.inbox.append(Admit(ReqId(rid), pack_tokens(prompt), len(prompt), sampling))
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
        if rng.random() < 0.15:
            texts.inbox.append(Abort(ReqId(rng.randrange(1, rid + 1))))
    for _ in range(2000):
        engine.step()
        if engine._scheduler.is_idle and not texts.inbox:
            break
    assert texts.failed == {}
    assert len(texts.finished) == NUM_REQS
    return {rid: texts.tokens[rid] for rid, why in texts.finished.items() if why is not FinishReason.ABORT}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_loads_give_the_same_texts(
    folders: tuple[Path, Path], tmp_path: Path, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_sizes, "PROMPT_BUCKETS", (2, 4, 8))
    taken: list[bool] = []
    run = PromptGraphs.run

    def noted(self: PromptGraphs, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        rows = run(self, chunks, feature_row)
        taken.append(rows is not None)
        return rows

    monkeypatch.setattr(PromptGraphs, "run", noted)
    with serving(folders, tmp_path / "graphs", device) as engine:
        taken.clear()
        with_graphs = texts_of(engine, seed)
        assert " graphs=1,2,4 prompt_graphs=2,4,8 " in engine.lines()[0]
    assert {True, False} == set(taken), "some prompts are too long or too many"
    taken.clear()
    with serving(folders, tmp_path / "eager", device, disable_cuda_graph=True) as engine:
        without = texts_of(engine, seed)
        assert " graphs=none prompt_graphs=none " in engine.lines()[0]
    assert taken == []
    assert with_graphs == without
    assert len(without) >= NUM_REQS // 2


@pytest.mark.parametrize(
    ("backend", "graphs", "warm_ups"),
    [("triton", "12", [(11, 1), (12, 2)]), ("torch", "none", [(1, 1), (11, 2), (12, 2), (12, 1)])],
)
def test_a_backend_that_is_asked_for_computes_all_prompts_and_compiles_what_it_needs(
    folders: tuple[Path, Path],
    tmp_path: Path,
    device: str,
    backend: str,
    graphs: str,
    warm_ups: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[int, int]] = []
    run = PromptStep.run

    def noted(self: PromptStep, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        seen.append((sum(len(chunk.token_ids) for chunk in chunks), sum(chunk.is_last for chunk in chunks)))
        return run(self, chunks, feature_row)

    monkeypatch.setattr(PromptStep, "run", noted)
    with serving(folders, tmp_path / "run", device, attention_backend=backend) as engine:
        assert engine.lines()[0].startswith(
            f"attention blocks=triton prompts={backend} graphs=1,2,4 prompt_graphs={graphs} capture_s="
        )
    assert seen == warm_ups
