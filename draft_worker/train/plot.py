"""`python -m draft_worker.train.plot`: loss and acceptance over a run's steps, as a PNG."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOSSES = ("loss", "cross_entropy", "total_variation", "selector")
LENGTHS = ("accept_length_greedy", "accept_length_sampled")


def read_log(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of a train.jsonl by their kind. A step that was made twice, after a crash, counts as it was made last."""
    kinds: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "held_out": {}}
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        kinds[entry["kind"]][entry["step"]] = entry
    return {kind: [entries[step] for step in sorted(entries)] for kind, entries in kinds.items()}


def plot(log: Path, image: Path) -> None:
    """Draw the log. Raises ValueError if nothing was logged yet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = read_log(log)
    if not kinds["step"]:
        raise ValueError(f"{log} holds no step")
    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accuracy, lengths = figure.subplots(3, 1, sharex=True)
    steps = [entry["step"] for entry in kinds["step"]]
    for name in LOSSES:
        if name in kinds["step"][0]:
            losses.plot(steps, [entry[name] for entry in kinds["step"]], label=name, linewidth=1)
    for row in range(len(kinds["step"][0]["accuracy"])):
        values = [entry["accuracy"][row] for entry in kinds["step"]]
        accuracy.plot(steps, values, label=f"row {row + 1}", linewidth=1)
    for name in LENGTHS:
        places = [entry["step"] for entry in kinds["held_out"]]
        lengths.plot(places, [entry[name] for entry in kinds["held_out"]], marker="o", label=name)
    for axes, text in ((losses, "loss"), (accuracy, "best token is right"), (lengths, "tokens a step, held out")):
        axes.set_ylabel(text)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    lengths.set_xlabel("step")
    figure.savefig(image, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Read a log, write a picture."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.plot", description=__doc__)
    parser.add_argument("log", type=Path, help="train.jsonl of a run")
    parser.add_argument("image", type=Path, help="PNG to write")
    args = parser.parse_args(argv)
    plot(args.log, args.image)


if __name__ == "__main__":
    main()
