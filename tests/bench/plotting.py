"""Pictures of benchmarks: matplotlib is asked for before anything is measured, and draws without a display."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any


def add_plot_flags(parser: argparse.ArgumentParser) -> None:
    """--plot and --from."""
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture there (needs matplotlib)")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="measure nothing, --plot this JSON of an earlier run"
    )


def check_plot_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process if no picture could be made."""
    if args.source and not args.plot:
        parser.error("--from needs --plot")
    if args.source and not args.source.is_file():
        parser.error(f"--from: there is no file {args.source}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")


def read_result(file: Path) -> dict[str, Any]:
    """What --json gave."""
    return json.loads(file.read_text(encoding="utf-8"))


def pyplot() -> Any:
    """matplotlib.pyplot, which draws into files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def over_requests(axis: Any, numbers: list[int], ylabel: str, title: str) -> None:
    """Both axes are logarithmic, with a tick for each number of requests."""
    axis.set(xscale="log", yscale="log", xlabel="requests", ylabel=ylabel, title=title)
    axis.set_xticks(numbers, [str(number) for number in numbers])
    axis.legend()
    axis.grid(alpha=0.3)


def save(figure: Any, path: Path) -> None:
    """Write the picture, and forget it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
