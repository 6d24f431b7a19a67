"""`python -m draft_worker.train.generate`: the target's own answers to a file of prompts."""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from draft_worker.train.config import GenerateConfig, model_folder_help
from draft_worker.train.decode import BatchDecoder
from draft_worker.train.fused_target import fuse
from draft_worker.train.repetition import in_loop, repeated_share
from draft_worker.train.sequences import Sequences, read_sequences, write_sequences
from memsvc.device.shards import FILE_BYTES
from target_worker.model.decoder import Decoder
from target_worker.model.weights import load_target
from target_worker.train.flags import existing, one_line_errors, parse, target_folder
from target_worker.train.start import begin

logger = logging.getLogger(__name__)

STEM = "answers"
_SORTED = 1024
"""Neighbouring jobs that are put in order of length, so that prompts of a refill are alike."""
_LOOP_SPAN, _LOOP_PERIOD = 64, 32
"""An answer is cut off, and dropped, when this many tokens repeat with a period up to that."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make."""

    prompt: int
    temperature: float


@dataclass(slots=True)
class Answers:
    """What is finished and kept, and what was dropped."""

    prompts: Sequences
    config: GenerateConfig
    jobs: list[Job] = field(default_factory=list)
    answers: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    """Of answers that are kept."""
    num_looped: int = 0
    num_made: int = 0
    """Tokens of all answers."""

    def add(self, job: Job, answer: np.ndarray, *, looped: bool) -> None:
        """A finished answer; one that goes round in circles is counted and forgotten."""
        self.num_made += len(answer)
        if looped or repeated_share(answer, self.config.loop_ngram) > self.config.loop_share:
            self.num_looped += 1
            return
        self.jobs.append(job)
        self.answers.append(answer)
        self.num_tokens += len(answer)

    def sequences(self) -> Sequences:
        """Prompt and answer of each, in the order of prompts."""
        order = sorted(range(len(self.jobs)), key=lambda i: (self.jobs[i].prompt, self.jobs[i].temperature))
        heads = [self.prompts[self.jobs[i].prompt] for i in order]
        tails = [self.answers[i].astype(self.prompts.tokens.dtype) for i in order]
        lens = [len(head) + len(tail) for head, tail in zip(heads, tails, strict=True)]
        pieces = [piece for pair in zip(heads, tails, strict=True) for piece in pair]
        return Sequences(
            tokens=np.concatenate(pieces) if pieces else self.prompts.tokens[:0],
            ends=np.cumsum(lens, dtype=np.int64),
            prompt_lens=np.array([len(head) for head in heads], dtype=np.int32),
            temperatures=np.array([self.jobs[i].temperature for i in order], dtype=np.float32),
            groups=np.array([self.jobs[i].prompt for i in order], dtype=np.int32),
        )

    def facts(self) -> dict[str, int]:
        """Counts for the log."""
        return {
            "answers": len(self.jobs), "answer_tokens": self.num_tokens,
            "dropped_loops": self.num_looped, "made_tokens": self.num_made,
        }  # fmt: skip


def plan_jobs(prompts: Sequences, config: GenerateConfig) -> list[Job]:
    """Every prompt once greedy and `samples` times sampled, shuffled, then neighbours in order of length."""
    jobs = [Job(index, 0.0) for index in range(len(prompts))]
    jobs += [Job(index, config.temperature) for _ in range(config.samples) for index in range(len(prompts))]
    order = np.random.default_rng(config.seed).permutation(len(jobs))
    lens = prompts.lens
    planned: list[Job] = []
    for start in range(0, len(jobs), _SORTED):
        piece = [jobs[index] for index in order[start : start + _SORTED]]
        planned += sorted(piece, key=lambda job: int(lens[job.prompt]))
    return planned


class Generation:
    """Feeds jobs to a decoder until they, the time or the tokens asked for run out, then finishes what is under way."""

    def __init__(self, model: Decoder, prompts: Sequences, config: GenerateConfig) -> None:
        jobs = plan_jobs(prompts, config)
        max_len = int(prompts.lens.max()) + config.max_new
        if max_len > model.shape.max_positions:
            raise ValueError(
                f"prompts of up to {prompts.lens.max()} tokens and answers of {config.max_new}"
                f" exceed the model's {model.shape.max_positions} positions"
            )
        self._config = config
        self._decoder = BatchDecoder(model, min(config.slots, len(jobs)), max_len, config.max_new)
        self._waiting = iter(jobs)
        self._running: dict[int, Job] = {}
        self._started = time.monotonic()
        self.answers = Answers(prompts, config)

    def run(self) -> Answers:
        """All answers."""
        torch.manual_seed(self._config.seed)
        with tqdm(unit="tok", unit_scale=True, desc="generate") as bar:
            while self._refill():
                self._decoder.run(self._config.refill_every)
                before = self.answers.num_made
                self._collect()
                bar.update(self.answers.num_made - before)
                bar.set_postfix(running=len(self._running), kept=self.answers.num_tokens, refresh=False)
        return self.answers

    def _refill(self) -> bool:
        """Put waiting jobs into free slots; whether anything runs."""
        config = self._config
        late = config.generate_seconds and time.monotonic() - self._started > config.generate_seconds
        enough = config.max_tokens and self.answers.num_tokens >= config.max_tokens
        if not (late or enough):
            free = [slot for slot in range(self._decoder.slots) if slot not in self._running]
            begun = list(zip(free, self._waiting, strict=False))
            if begun:
                prompts = [self.answers.prompts[job.prompt] for _, job in begun]
                self._decoder.fill([slot for slot, _ in begun], prompts, [job.temperature for _, job in begun])
                self._running |= dict(begun)
        return bool(self._running)

    def _collect(self) -> None:
        """Take finished answers out of their slots."""
        decoder = self._decoder
        looped = in_loop(decoder.answers, decoder.num_new, span=_LOOP_SPAN, max_period=_LOOP_PERIOD)
        decoder.alive &= ~looped
        alive, looped = decoder.alive.tolist(), looped.tolist()
        done = [slot for slot in self._running if not alive[slot]]
        if not done:
            return
        where = torch.tensor(done, device=decoder.answers.device)
        rows, lens = decoder.answers[where].cpu().numpy(), decoder.num_new[where].tolist()
        for slot, row, num in zip(done, rows, lens, strict=True):
            self.answers.add(self._running.pop(slot), row[:num].copy(), looped=looped[slot])


def generate(
    target: Path, prompts: Path, device: str, config: GenerateConfig
) -> tuple[Sequences, dict[str, int | float]]:
    """Answers of the target in a folder, and figures about them."""
    model, _ = load_target(target, device=device)
    started = time.monotonic()
    answers = Generation(fuse(model), read_sequences(prompts), config).run()
    seconds = time.monotonic() - started
    facts: dict[str, int | float] = {**answers.facts(), "seconds": round(seconds, 1)}
    facts["tokens_per_s"] = round(answers.num_made / seconds)
    logger.info("generated %s", " ".join(f"{name}={value}" for name, value in facts.items()))
    return answers.sequences(), facts


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Write the answers as shards, and what was counted as answers.json."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.generate", description=__doc__)
    parser.add_argument("--target", required=True, help=model_folder_help())
    parser.add_argument("--prompts", required=True, type=Path, help="file or folder made by train.prompts")
    parser.add_argument("--out", required=True, type=Path, help="folder of the answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, config = parse(parser, argv, GenerateConfig)
    begin(args.device)
    prompts = existing("--prompts", args.prompts)
    sequences, facts = generate(target_folder(args.target), prompts, args.device, config)
    files = write_sequences(args.out, STEM, sequences, FILE_BYTES)
    (args.out / f"{STEM}.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    logger.info("wrote files=%d bytes=%d", len(files), sum(file.stat().st_size for file in files))


if __name__ == "__main__":
    main()
