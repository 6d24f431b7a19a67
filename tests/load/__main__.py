"""python -m tests.load: load a server, print the report, exit with 1 if requests failed or bytes leaked."""

import json
import sys

import uvloop

from tests.load.options import parse_options
from tests.load.report import make_report, save_texts, table, verdict
from tests.load.run import run_load


def main(argv: list[str] | None = None) -> int:
    """Run with these arguments; the exit status."""
    options = parse_options(argv)
    try:
        result = uvloop.run(run_load(options))
    except (ConnectionError, ValueError, OSError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    report = make_report(result, options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if options.save_texts is not None:
        save_texts(options.save_texts, result.calls)
    print(table(report))
    reason = verdict(report)
    if reason:
        print(f"load: not a success: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
