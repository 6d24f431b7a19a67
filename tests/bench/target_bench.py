"""Figures of a target's steps under several settings, row by row, and the kernels of all of them.

The profiler comes last: what it leaves behind in the process may cost time.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.bench.kernel_table import Event, Recording, Table, recorded, shown, summarise
from tests.bench.target_setup import Setup, Steps
from tests.bench.target_turns import PromptForm, Row, apart, clock_of, prompt_row, verify_row
from tests.bench.variants import UnknownSettingError, Variant, parse_variant

PROFILED = {"verify": 5, "prefill": 2}
"""Steps that the profiler sees, at most."""


class Bench:
    """Rows and tables as they come. A variant that fails is a finding, unless the device fails with it."""

    def __init__(self, setup: Setup, *, repeats: int, seconds: float, save: Callable[["Bench"], None]) -> None:
        """repeats: of a verify; prompts take longer and have fewer. Nothing is begun after so many seconds.

        save is called when there is something new.
        """
        self.rows: list[Row] = []
        self.kernels: list[Table] = []
        self.failures: list[dict[str, str]] = []
        self.facts: dict[str, Any] = {}
        self._setup = setup
        self._device = setup.base.arena.device.type
        self._repeats = {"verify": repeats, "prefill": -(-repeats // 5)}
        self._save = save
        self._end = time.monotonic() + seconds
        self._made: list[tuple[Variant, Steps]] = []
        self._wanted: dict[str, torch.Tensor] = {}
        """What base computed."""

    def prefills(self, steps: Steps) -> list[PromptForm]:
        """Each step of prompts that is measured: eagerly, and by a graph if there is one."""
        job = self._setup.job
        forms = [PromptForm(lens) for num in job.prefill for lens in (job.prompts(num), [num])]
        forms += [PromptForm([num], job.context - num) for num in job.rests]
        forms = [form for i, form in enumerate(forms) if form not in forms[:i]]
        return [
            each
            for form in forms
            for each in (form, replace(form, by_graph=True))
            if not each.by_graph or steps.has_graph(form.chunks(steps))
        ]

    def note(self, what: str, find: Callable[[], dict[str, Any]]) -> None:
        """Facts that are good to have."""
        self.facts |= self._try(Variant(what), "facts", find) or {}

    def measure_named(self, text: str) -> None:
        """All times of a variant of the command line."""
        try:
            variant = parse_variant(text)
        except UnknownSettingError as error:
            self.failures.append({"variant": text, "what": "settings", "why": str(error)})
        else:
            self.measure(variant)

    def measure(self, variant: Variant) -> None:
        """All times of one."""
        with variant.in_force():
            steps, split = self._try(variant, "capture", lambda: self._make(variant)) or (None, None)
            if steps is None or split is None:
                return
            for num_reqs in self._setup.job.concurrency:
                self._try(variant, f"verify {num_reqs}", lambda n=num_reqs: self._verify(variant, (steps, split), n))
            for form in self.prefills(steps):
                self._try(variant, f"prefill {form.facts}", lambda f=form: self._prefill(variant, steps, f))
        self._made.append((variant, steps))

    def _make(self, variant: Variant) -> tuple[Steps, Steps]:
        began = time.perf_counter()
        made = Steps(self._setup), Steps(self._setup, is_split=True)
        captured = []
        for steps in made:
            variant.change(steps.parts.verify)
            captured.append(steps.capture())
        for steps in made:
            steps.open()
        # Prompts of an earlier variant have moved a hybrid's states; keys and values they leave as they are.
        if not self._made or self._setup.is_hybrid:
            made[0].fill()
        if not self._made:
            self.facts["prefill_backend"] = made[0].prefill_name
        clock_of(made[0]).wait()
        self.facts.setdefault("made", {})[variant.name] = {
            "seconds": round(time.perf_counter() - began, 1), "graph_bytes": captured[0][1],
        }  # fmt: skip
        return made

    def _verify(self, variant: Variant, pair: tuple[Steps, Steps], num_reqs: int) -> None:
        row = verify_row(*pair, num_reqs, self._repeats["verify"])
        features = pair[0].features(row["rows"])
        self._add(variant, row, self._apart(f"verify {num_reqs}", features))

    def _prefill(self, variant: Variant, steps: Steps, form: PromptForm) -> None:
        row = prompt_row(steps, form, self._repeats["prefill"])
        with steps.running:
            got = form.putter(steps)()
            if form.by_graph:
                # It leaves no logits, but features, to be compared with those of the eager step before it.
                got = steps.features(row["tokens"], steps.prompt_row).clone()
                replace(form, by_graph=False).putter(steps)()
                self._wanted[f"prefill {form.facts}"] = steps.features(row["tokens"], steps.prompt_row).clone()
                steps.reset()
        clock_of(steps).wait()
        assert got is not None
        self._add(variant, row, self._apart(f"prefill {form.facts}", got))

    def _apart(self, what: str, got: torch.Tensor) -> float:
        return float(f"{apart(got, self._wanted.setdefault(what, got.clone())):.2e}")

    def _add(self, variant: Variant, row: Row, error: float) -> None:
        self.rows.append({"variant": variant.name} | row | {"apart": error})
        print(" ".join(f"{name}={value}" for name, value in self.rows[-1].items()), flush=True)
        self._save(self)

    def profile(self) -> None:
        """Tables of kernels of everything that was measured."""
        with recorded(self._device) as recording:
            seen = [
                (row, *parts)
                for variant, steps in self._made
                for row in self.rows
                if row["variant"] == variant.name
                if (
                    parts := self._try(
                        variant, "kernels", lambda v=variant, s=steps, r=row: self._record(recording, v, s, r)
                    )
                )
            ]
        for row, num_steps, part, eager_part in seen:
            self._table(row, num_steps, recording.parts[part], recording.parts[eager_part])

    def _record(self, recording: Recording, variant: Variant, steps: Steps, row: Row) -> tuple[int, int, int]:
        """Steps that are seen, their part of the recording, and that of one step that is no graph."""
        num_steps = min(PROFILED[row["step"]], self._repeats[row["step"]])
        with variant.in_force(), steps.running:
            if row["step"] == "prefill":
                form = PromptForm.of_row(row)
                part = recording.add(form.putter(steps), num_steps)
                if not form.by_graph:
                    return num_steps, part, part
                steps.reset()
                return num_steps, part, recording.add(replace(form, by_graph=False).putter(steps), 1)
            num_reqs = row["concurrency"]
            steps.choose(num_reqs)
            steps.reset()
            part = recording.add(lambda: steps.verify(num_reqs), num_steps)
            eager_part = recording.add(lambda: steps.verify_eagerly(num_reqs), 1)
            steps.reset()
            return num_steps, part, eager_part

    def _table(self, row: Row, num_steps: int, events: list[Event], eager_events: list[Event]) -> None:
        # A graph that the profiler takes for one piece says nothing; the same kernels run without it.
        is_whole = len(events) >= num_steps * self._setup.shape.num_layers
        found = (
            summarise(events, num_steps, row["device_us"]) if is_whole else summarise(eager_events, 1, row["device_us"])
        )
        facts = {
            name: row[name] for name in ("variant", "step", "concurrency", "prompts", "start", "route") if name in row
        }
        self.kernels.append(facts | {"is_timed_form": is_whole} | found)
        print(f"\n{' '.join(f'{name}={value}' for name, value in facts.items())}")
        print("\n".join(shown(found)), flush=True)

    def _try(self, variant: Variant, what: str, do: Callable[[], Any]) -> Any:
        """Its result; None if it failed or no time was left. Raises what a device that is gone raises."""
        if time.monotonic() > self._end:
            self.failures.append({"variant": variant.name, "what": what, "why": "no time was left"})
            return None
        try:
            return do()
        except Exception as error:
            self.failures.append(
                {"variant": variant.name, "what": what, "why": f"{type(error).__name__}: {error}"[:500]}
            )
            print(f"failed: {self.failures[-1]}", flush=True)
            self._save(self)
            if self._device == "cuda":
                torch.cuda.synchronize()
            return None
