"""Whether two servers give the same greedy texts; where they do not, the first other token and the gap of its logits.

    python -m tests.bench.same_texts record --json cpu.json -- --device cpu --dtype float32
    python -m tests.bench.same_texts record --json cuda.json -- --device cuda --dtype float32
    python -m tests.bench.same_texts compare cpu.json cuda.json

record starts a server of a target and its drafter, asks it one prompt after the other, and keeps texts and acceptance
as draft_worker.train.evaluate counts it. compare loads the target on the CPU for the gap, in each of --dtypes. It ends
with 1 if answers differ, but for those whose gap in the first of these is no more than --max-gap, between tokens that
are as close to the likeliest ("behind"), after an answer of which the same holds ("before").
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draft_worker.train.evaluate import EvaluateConfig, ask_all, figures, read_prompts
from target_worker.train.flags import SMOLLM2
from tests.bench.ladder import facts
from tests.bench.same_texts_compare import Comparison, compare, report
from tests.bench.served_models import DRAFT_HELP, TARGET_HELP, find_model
from tests.bench.short_prompts import PROMPTS
from tests.load.report import without_folders
from tests.support.served import Served

_READY_S = 400.0
"""On a CUDA device kernels are compiled and graphs captured before the first request."""


def sha(prompt: str) -> str:
    """What stands for a prompt in a record."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def record(args: argparse.Namespace) -> dict[str, Any]:
    """A server's answers and figures. Raises RuntimeError if it refuses a prompt, AssertionError if it does not run."""
    model = find_model(args.target, args.draft)
    prompts = (list(PROMPTS) if args.prompts is None else read_prompts(args.prompts))[: args.num]
    config = EvaluateConfig(max_tokens=args.max_tokens, concurrency=args.concurrency, raw=args.raw)
    flags = model.flags(args.flags)
    with Served(flags, ready_s=_READY_S, log=args.log) as served:
        answers, seconds = ask_all(served.url, prompts, config)
    rows = [{"prompt_sha256": sha(prompt), **asdict(answer)} for prompt, answer in zip(prompts, answers, strict=True)]
    about = {
        "target": without_folders(args.target), "max_tokens": args.max_tokens, "raw": args.raw,
        "concurrency": args.concurrency, "prompts": "own" if args.prompts is None else args.prompts.name,
        "flags": without_folders(flags), "facts": facts(served.lines), "start_s": round(served.start_s, 1),
    }  # fmt: skip
    return {"config": about, **figures(answers, config), "seconds": round(seconds, 2), "answers": rows}


def compare_files(args: argparse.Namespace) -> Comparison:
    """Raises ValueError if the records are not of the same questions, or the target is not there."""
    a, b = (json.loads(path.read_text("utf-8")) for path in (args.a, args.b))
    known = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    return compare(a, b, {sha(prompt): prompt for prompt in known}, args.target or a["config"]["target"], args.dtypes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.same_texts", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="start a server and keep its greedy answers")
    one.add_argument("--json", type=Path, required=True, metavar="FILE")
    one.add_argument("--target", default=SMOLLM2, help=TARGET_HELP)
    one.add_argument("--draft", default="", help=DRAFT_HELP)
    one.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or JSON lines; left out, our own")
    one.add_argument("--num", type=int, default=20, help="only the first so many prompts (%(default)s)")
    one.add_argument("--max-tokens", type=int, default=128, help="longest answer (%(default)s)")
    one.add_argument("--concurrency", type=int, default=1, help="requests in flight at a time (%(default)s)")
    one.add_argument("--raw", action="store_true", help="send prompts as texts to go on with, not as chat messages")
    one.add_argument("--log", type=Path, metavar="FILE", help="what the server logs")
    one.add_argument("flags", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    two = commands.add_parser("compare", help="say where the answers of two records part")
    two.add_argument("a", type=Path)
    two.add_argument("b", type=Path)
    two.add_argument("--json", type=Path, metavar="FILE")
    two.add_argument("--target", default="", help=f"{TARGET_HELP}; left out, as recorded")
    two.add_argument("--prompts", type=Path, metavar="FILE", help="the file that was asked, if it was not our own")
    two.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"],
                     help="in which the gap is computed on the CPU (float32,bfloat16)")  # fmt: skip
    two.add_argument("--max-gap", type=float, default=0.0, help="answers that part by no more than that are let pass")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if texts differ, 2 if there is nothing to compare."""
    args = parse(argv)
    try:
        if args.command == "record":
            result, text, status = record(args), "", 0
            text = " ".join(f"{name}={value}" for name, value in result.items() if not isinstance(value, dict | list))
        else:
            found = compare_files(args)
            result, text, status = found.as_json(), report(found), int(not found.passes(args.max_gap))
    except (AssertionError, RuntimeError, ValueError, OSError) as error:
        print(f"same_texts: {error}", file=sys.stderr)
        return 2
    print(text)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
