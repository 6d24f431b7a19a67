"""`python -m draft_worker.train.run`: generate, then train, in slices; the same command again goes on.

For machines that are lent for minutes: everything that is needed to go on lies in --work, and what is
worth keeping is copied to --home in files of at most 15 MiB after each slice.
"""

import argparse
import gc
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from draft_worker.train.config import DrafterConfig, GenerateConfig, LossConfig, TrainConfig, model_folder_help
from draft_worker.train.generate import STEM, generate
from draft_worker.train.plot import plot, read_log
from draft_worker.train.sequences import SUFFIX, write_sequences
from draft_worker.train.trainer import LOG_FILE, Paths, Trainer
from memsvc.device.shards import FILE_BYTES
from target_worker.train.flags import existing, one_line_errors, parse, target_folder
from target_worker.train.start import begin
from target_worker.train.state import Progress, has_state, read_facts

logger = logging.getLogger(__name__)

_LEAST_SLICE_S = 30.0
"""A slice with less time left for training than this does not begin it."""


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """One slice."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.run", description=__doc__)
    parser.add_argument("--target", required=True, help=model_folder_help())
    parser.add_argument("--prompts", required=True, type=Path, help="file or folder made by train.prompts")
    parser.add_argument("--work", required=True, type=Path, help="folder that stays between slices")
    parser.add_argument("--home", required=True, type=Path, help="folder for what is to be brought home")
    parser.add_argument("--init", type=Path, default=None, help="drafter to start from")
    parser.add_argument("--slice-seconds", type=float, default=480.0, help="length of this slice (default 480)")
    parser.add_argument("--keep-answers", action="store_true", help="bring the answers home, not the drafter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, *configs = parse(parser, argv, GenerateConfig, DrafterConfig, LossConfig, TrainConfig)
    begin(args.device)
    target = target_folder(args.target)
    answers = _answers(args, target, configs[0])
    left = args.slice_seconds - (time.monotonic() - started)
    state = args.work / "state"
    if left > _LEAST_SLICE_S:
        paths = Paths(target=target, answers=answers, state=state, out=args.work / "drafter", init=args.init)
        config = replace(configs[3], max_seconds=left)
        progress = _train(Trainer(paths, configs[1], configs[2], config, args.device), paths)
    else:
        progress = _progress_before(state, configs[3].steps)
    _bring_home(args)
    logger.info("%s", what_is_left(progress))


def _answers(args: argparse.Namespace, target: Path, config: GenerateConfig) -> Path:
    """The folder of answers, made first if an earlier slice has not."""
    folder = args.work / STEM
    facts_file = folder / f"{STEM}.json"
    if not facts_file.is_file():
        sequences, facts = generate(target, existing("--prompts", args.prompts), args.device, config)
        write_sequences(folder, STEM, sequences, FILE_BYTES)
        facts_file.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        if args.device.startswith("cuda"):
            # The cache of a generation is larger than what training leaves free.
            gc.collect()
            torch.cuda.empty_cache()
    return folder


def _train(trainer: Trainer, paths: Paths) -> Progress:
    if trainer.is_done:
        return trainer.progress
    trainer.run()
    log = paths.state / LOG_FILE
    if read_log(log)["step"]:  # A slice of few steps writes no line.
        plot(log, paths.state / "train.png")
    return trainer.progress


def _progress_before(state: Path, steps: int) -> Progress:
    """Where earlier slices came to, in a slice that had no time to train; steps: asked for now, 0 = as planned."""
    progress = Progress(**read_facts(state)["progress"]) if has_state(state) else Progress()
    progress.total_steps = steps or progress.total_steps
    return progress


def what_is_left(progress: Progress) -> str:
    """The last line of a slice: whether the command is to be given again."""
    step, total = progress.step, progress.total_steps
    if total and step >= total:
        return f"all steps are made: steps={step}"
    if not step:
        return "answers are made, all steps are left: the same command goes on"
    if not total:
        return f"steps made={step}, of how many is not known yet: the same command goes on"
    return f"steps left={total - step} of {total}: the same command goes on"


def _bring_home(args: argparse.Namespace) -> None:
    """Copy log, picture, figures, and the drafter, or the answers if they are asked for."""
    args.home.mkdir(parents=True, exist_ok=True)
    work: Path = args.work
    wanted = [work / STEM / f"{STEM}.json", work / "state" / LOG_FILE, work / "state" / "train.png"]
    wanted += (work / STEM).glob(f"*{SUFFIX}") if args.keep_answers else (work / "drafter").glob("*")
    for file in wanted:
        if file.is_file():
            shutil.copyfile(file, args.home / file.name)
    sizes = {file.name: file.stat().st_size for file in sorted(args.home.iterdir())}
    logger.info("home files=%d bytes=%d %s", len(sizes), sum(sizes.values()), sizes)


if __name__ == "__main__":
    main()
