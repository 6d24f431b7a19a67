"""Where a request's recurrent state should stand: `python -m tests.bench.recurrence` prints JSON.

Two ways to verify blocks of B rows without a state for each row, in one linear layer:
  edge       the state stands at the last page edge; a step replays the rows after it (page + 2B rows of
             ring) and writes the state only when it passes an edge
  committed  the state stands where the last block was accepted; a step replays the accepted rows of the
             block before (B rows of ring) and writes the state every time
Per way: us a step for one layer (median), and bytes a request of ring, of state read and of state written a step.
The two take turns on the same accept lengths. Only `edge` can freeze an aligned state at any time.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

import torch

from memsvc.device.gated_delta import DeltaRows, core_of, gated_delta_rule

PAGE_SIZE = 16
BLOCK = 9
K_HEADS, V_HEADS, DIM = 16, 48, 128
ROW_BYTES = 20_864
"""Of a ring at this geometry: (2 * 16 * 128 + 48 * 128) bf16 and 2 * 48 fp32."""
STATE_BYTES = V_HEADS * DIM * DIM * 4


@dataclass(slots=True)
class Figures:
    """Sums over the steps of one way."""

    seconds: list[float]
    written: int = 0
    steps: int = 0


def random_rows(num_reqs: int, num_rows: int) -> DeltaRows:
    """Inputs of unit scale with gates as models have them."""
    q, k = (torch.randn(num_reqs, num_rows, K_HEADS, DIM) for _ in range(2))
    v = torch.randn(num_reqs, num_rows, V_HEADS, DIM)
    gates = torch.rand(num_reqs, num_rows, V_HEADS)
    return DeltaRows(q, k, v, -gates, gates)


def step(states: torch.Tensor, replayed: list[int], keep: list[int]) -> float:
    """Seconds of one layer's recurrences: requests of like length together, as the target groups them."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, num in enumerate(replayed):
        groups.setdefault(core_of(num + BLOCK), []).append(i)
    inputs = {form: random_rows(len(members), form[1]) for form, members in groups.items()}
    began = time.perf_counter()
    for (chunk, num_rows), members in groups.items():
        at = torch.tensor(members)
        _, kept = gated_delta_rule(inputs[chunk, num_rows], states[at], [keep[i] for i in members], chunk)
        if kept.members:
            states[at[kept.members]] = kept.states
    return time.perf_counter() - began


def measure(num_reqs: int, num_steps: int, seed: int) -> dict[str, Figures]:
    """Both ways over the same accept lengths."""
    dice = random.Random(seed)
    edge, committed = Figures([]), Figures([])
    states = torch.zeros(num_reqs, V_HEADS, DIM, DIM)
    lens = [dice.randrange(PAGE_SIZE) for _ in range(num_reqs)]
    stands = [0] * num_reqs
    last = [0] * num_reqs
    for _ in range(num_steps):
        edges = [(n + 1) // PAGE_SIZE * PAGE_SIZE for n in lens]
        keep = [max(0, e - s) for e, s in zip(edges, stands, strict=True)]
        edge.seconds.append(step(states, [n - s for n, s in zip(lens, stands, strict=True)], keep))
        edge.written += sum(k > 0 for k in keep)
        committed.seconds.append(step(states, last, last))
        committed.written += sum(k > 0 for k in last)
        stands = [max(e, s) for e, s in zip(edges, stands, strict=True)]
        last = [dice.randint(1, 7) for _ in range(num_reqs)]
        lens = [n + a for n, a in zip(lens, last, strict=True)]
    edge.steps = committed.steps = num_steps * num_reqs
    return {"edge": edge, "committed": committed}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each way")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for num_reqs in (1, 8, 32):
        found = measure(num_reqs, arguments.steps, seed=1)
        for name, figures in found.items():
            rows = PAGE_SIZE + 2 * BLOCK if name == "edge" else BLOCK
            results[f"{name}_{num_reqs}"] = {
                "layer_us": round(statistics.median(figures.seconds) * 1e6),
                "ring_bytes": rows * ROW_BYTES,
                "state_bytes_read": STATE_BYTES,
                "state_bytes_written": round(figures.written / figures.steps * STATE_BYTES),
            }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
