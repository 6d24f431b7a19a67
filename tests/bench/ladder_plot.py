"""A picture of a ladder: output tokens a second over the number of requests, beside another engine's."""

from pathlib import Path
from typing import Any

from tests.bench.plotting import over_requests, pyplot, save


def plot(result: dict[str, Any], path: Path) -> None:
    """result: as `python -m tests.bench.ladder --json` writes it. Over each point, how many times the peer's figure."""
    config = result["config"]
    own = {row["c"]: row["output_tok_s"] for row in sorted(result["rows"], key=lambda row: row["c"])}
    # JSON has keys of text.
    known = {int(c): rate for c, rate in config["peer_output_tok_s"].items()}
    peer = {c: known[c] for c in own if c in known}
    figure, axis = pyplot().subplots(figsize=(6, 4.5))
    axis.plot(list(own), list(own.values()), "o-", label="memsvc")
    if peer:
        axis.plot(list(peer), list(peer.values()), "k--", label=config.get("peer", "peer"))
    for c, rate in peer.items():
        axis.annotate(
            f"{own[c] / rate:.2f}x", (c, own[c]), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8
        )
    lengths = f"{config['prompt_tokens']} in, {config['output_tokens']} out, {config['accept_length']:g} a verify"
    over_requests(axis, list(own), "output tokens a second", f"{config['geometry']}: {lengths}")
    axis.margins(y=0.12)
    save(figure, path)
