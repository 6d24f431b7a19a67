"""How far a target in fp8 is from the same in bf16: tokens, probabilities and perplexity, on the CPU's arithmetic.

    python -m tests.bench.fp8_accuracy --json docs/benchmarks/fp8-accuracy.json

bf16 answers the prompts of tests.bench.short_prompts greedily. Each variant then reads prompts and answers: how often
its likeliest token is bf16's, where bf16 was sure and everywhere, and the divergence of its distribution from bf16's.
Perplexity is of a text of this repository, whose hash is recorded. float32 shows what bf16's own rounding does, kv_fp8
what pages of keys and values in 8 bits do. The default model is left out, and named, where it has not been fetched yet.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from draft_worker.train.decode import BatchDecoder
from draft_worker.train.delta import WholeSequences
from draft_worker.train.target import causal_attention
from launch.smollm2 import MODEL_NAME, default_cache_dir, ensure_smollm2, fingerprint
from memsvc.device.checkpoint import SINGLE_FILE
from memsvc.device.fp8 import quantise_weight
from memsvc.device.fp8_pages import rounded
from memsvc.device.scaled_weights import scaled
from memsvc.wire.text import ChatMessage, ChatPrompt, TextPrompt
from target_worker.model.decoder import Decoder
from target_worker.model.fp8_stacks import stack_of
from target_worker.model.weights import load_target
from tests.bench.served_models import TINY_HYBRID, find_model
from tests.bench.short_prompts import PROMPTS
from tests.support.fp8_folders import BLOCKS, by_blocks, make_fp8
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder, Text

TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
WINDOW = 2000
"""Characters of the text that are read at once."""
SURE = 0.5
"""bf16 is sure of a token to which it gives more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Token ids."""

    prompts: list[list[int]]
    windows: list[list[int]]
    """Pieces of TEXT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a model says of prompts with answers, and of the text."""

    rows: list[torch.Tensor]
    """Log-probabilities [tokens of the answer, vocab] of each prompt."""
    perplexity: float


def read_texts(folder: Path, *, raw: bool, num_prompts: int, num_windows: int) -> Texts:
    """As the server of that folder makes tokens. raw: without a chat template."""
    encoder = PromptEncoder(TokenizerConfig(run_dir="", model_path=str(folder), context_len=2048))
    asked = [TextPrompt(prompt) if raw else ChatPrompt([ChatMessage("user", prompt)]) for prompt in PROMPTS]
    text = TEXT.read_text("utf-8")
    pieces = [text[start : start + WINDOW] for start in range(0, len(text) - WINDOW + 1, WINDOW)][:num_windows]
    return Texts(
        prompts=[list(encoder.encode(encoder.text_of(prompt))) for prompt in asked[:num_prompts]],
        windows=[list(encoder.encode(Text(text=piece, adds_special=True))) for piece in pieces],
    )


def greedy(model: Decoder, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """The answer to each prompt."""
    decoder = BatchDecoder(model, len(prompts), max(map(len, prompts)) + max_new, max_new)
    decoder.fill(list(range(len(prompts))), [np.array(prompt) for prompt in prompts], [0.0] * len(prompts))
    decoder.run(max_new)
    return [row[:num].tolist() for row, num in zip(decoder.answers, decoder.num_new.tolist(), strict=True)]


@torch.no_grad()
def read(model: Decoder, texts: Texts, answers: list[list[int]], *, has_fp8_kv: bool = False) -> Reading:
    """One forward for each. has_fp8_kv: keys and values are attended as pages of e4m3 hold them."""
    spec = model.shape.linear
    recur = None if spec is None else WholeSequences(spec, 1).recur

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if has_fp8_kv:
            k, v = (rounded(part).to(q.dtype) for part in (k, v))
        return causal_attention(q[None], k[None], v[None])

    def log_shares(ids: list[int], first: int) -> torch.Tensor:
        hidden = model.hidden(torch.tensor(ids), torch.arange(len(ids)), attend, recur=recur)
        return F.log_softmax(model.logits(hidden[first - 1 : -1]).float(), dim=-1)

    rows = [log_shares(prompt + answer, len(prompt)) for prompt, answer in zip(texts.prompts, answers, strict=True)]
    losses = [
        F.nll_loss(log_shares(ids, 1), torch.tensor(ids[1:]), reduction="none") for ids in texts.windows if len(ids) > 1
    ]
    return Reading(rows=rows, perplexity=math.exp(float(torch.cat(losses).mean())))


def compared(found: Reading, wanted: Reading) -> dict[str, float]:
    """Of a variant, beside bf16."""
    ours, theirs = torch.cat(found.rows), torch.cat(wanted.rows)
    same, sure = ours.argmax(1) == theirs.argmax(1), theirs.amax(1).exp() > SURE
    divergence = (theirs.exp() * (theirs - ours)).sum(1)
    firsts = [bool((a.argmax(1) == b.argmax(1)).all()) for a, b in zip(found.rows, wanted.rows, strict=True)]
    return {
        "perplexity": round(found.perplexity, 4),
        "perplexity_over_bf16": round(found.perplexity / wanted.perplexity, 5),
        "same_token": round(float(same.float().mean()), 4),
        "same_token_where_sure": round(float(same[sure].float().mean()), 4),
        "same_answers": sum(firsts),
        "mean_divergence": round(float(divergence.mean()), 6),
    }


def weight_errors(folder: Path) -> dict[str, float]:
    """Root of squared error over squared weights, of all layers' matrices, that rounding to fp8 makes."""
    errors, total = {"rows": 0.0, "blocks": 0.0, "blocks_made_rows": 0.0}, 0.0
    for name, tensor in load_file(folder / SINGLE_FILE).items():
        if stack_of(name) is None:
            continue
        weight, stored = tensor.float(), by_blocks(tensor)
        blocks = scaled(stored[""], stored["_scale_inv"], torch.float32)
        rounded = {
            "rows": quantise_weight(weight, torch.float32).floats(),
            "blocks": blocks,
            "blocks_made_rows": quantise_weight(blocks, torch.float32).floats(),
        }
        total += float(weight.square().sum())
        for kind, found in rounded.items():
            errors[kind] += float((found - weight).square().sum())
    return {kind: round(math.sqrt(error / total), 5) for kind, error in errors.items()}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model beside bf16's."""

    load: Callable[[], Decoder]
    has_fp8_kv: bool = False


Variants = dict[str, Variant]


@contextmanager
def variants(folder: Path) -> Iterator[Variants]:
    """Models by name, each loaded when it is asked for."""
    found: Variants = {
        "float32": Variant(lambda: load_target(folder, "float32")[0]),
        "fp8": Variant(lambda: load_target(folder, "bfloat16", quantization="fp8")[0]),
        "kv_fp8": Variant(lambda: load_target(folder, "bfloat16")[0], True),
        "fp8, kv_fp8": Variant(lambda: load_target(folder, "bfloat16", quantization="fp8")[0], True),
    }
    if "quantization_config" in json.loads((folder / "config.json").read_text("utf-8")):
        yield found
        return
    with tempfile.TemporaryDirectory() as made:
        blocks = make_fp8(folder, Path(made) / "blocks", by_blocks, BLOCKS)
        yield found | {
            "blocks, weights alone": Variant(lambda: load_target(blocks, "bfloat16")[0]),
            "blocks made rows": Variant(lambda: load_target(blocks, "bfloat16", quantization="fp8")[0]),
        }


def measure(folder: Path, args: argparse.Namespace, *, raw: bool) -> dict[str, Any]:
    """All variants of one model."""
    texts = read_texts(folder, raw=raw, num_prompts=args.prompts, num_windows=args.windows)
    model, _ = load_target(folder, "bfloat16")
    answers = greedy(model, texts.prompts, args.max_new)
    wanted = read(model, texts, answers)
    with variants(folder) as made:
        rows = {
            name: compared(read(variant.load(), texts, answers, has_fp8_kv=variant.has_fp8_kv), wanted)
            for name, variant in made.items()
        }
        has_blocks = any("blocks" in name for name in made)
    return {
        "prompts": len(texts.prompts),
        "answer_tokens": sum(map(len, answers)),
        "text_tokens": sum(map(len, texts.windows)),
        "bf16_perplexity": round(wanted.perplexity, 4),
        "variants": rows,
        "weight_errors": weight_errors(folder) if has_blocks else None,
    }


def main() -> None:
    """Write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fp8_accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the record; without it the record is printed")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="of short_prompts, from the first on")
    parser.add_argument("--max-new", type=int, default=64, help="longest answer in tokens")
    parser.add_argument("--windows", type=int, default=6, help=f"pieces of the text, {WINDOW} characters each")
    args = parser.parse_args()
    models = {TINY_HYBRID: measure(find_model(TINY_HYBRID).folder, args, raw=True)}
    if (default_cache_dir() / "smollm2" / fingerprint() / MODEL_NAME).is_dir():
        models[MODEL_NAME] = measure(ensure_smollm2(), args, raw=False)
    else:
        print(f"left out: {MODEL_NAME} has not been fetched; python -m launch.smollm2 does it", flush=True)
    record = {
        "text": {"file": TEXT.name, "sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest()},
        "max_new": args.max_new,
        "sure": SURE,
        "torch": torch.__version__,
        "models": models,
    }
    text = json.dumps(record, indent=1) + "\n"
    if args.json is None:
        print(text, end="")
    else:
        args.json.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
