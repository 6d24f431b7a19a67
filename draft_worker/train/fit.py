"""`python -m draft_worker.train.fit`: train a drafter on answers, or go on with a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_worker.train.config import DrafterConfig, LossConfig, TrainConfig, model_folder_help
from draft_worker.train.trainer import Paths, Trainer
from target_worker.train.flags import existing, one_line_errors, parse, target_folder
from target_worker.train.start import begin


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Train one slice."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.fit", description=__doc__)
    parser.add_argument("--target", required=True, help=model_folder_help())
    parser.add_argument("--answers", required=True, type=Path, help="folder made by train.generate")
    parser.add_argument("--state", required=True, type=Path, help="folder of state and log; goes on if there is one")
    parser.add_argument("--out", required=True, type=Path, help="folder of the drafter")
    parser.add_argument("--init", type=Path, default=None, help="drafter to start from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, drafter, loss, config = parse(parser, argv, DrafterConfig, LossConfig, TrainConfig)
    begin(args.device)
    target, answers = target_folder(args.target), existing("--answers", args.answers)
    paths = Paths(target=target, answers=answers, state=args.state, out=args.out, init=args.init)
    Trainer(paths, drafter, loss, config, args.device).run()


if __name__ == "__main__":
    main()
