"""Random loads for a pipelined engine: tiny pools, aborts, demands, and drafts that die and refuse at any moment."""

import random
from dataclasses import dataclass

import msgspec

from memsvc.wire.admin import Flush
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.toy_texts import prompt, settle
from tests.support.width_rig import Forced


@dataclass(frozen=True, slots=True)
class Load:
    """One load, by seed."""

    seed: int
    deaths: float = 0.0
    """Chance of each look at the device to kill the draft."""
    refusals: float = 0.0
    """Chance of each look to let the draft refuse the next plan."""
    demands: float = 0.0
    """Chance of each Step to have a request demanded back, as for another engine."""
    is_late: bool = True
    recurrent: bool = False

    def run(self) -> PipelinedEngine:
        """The engine, after everything that must hold at the end was asserted."""
        rng = random.Random(self.seed)
        engine = self._engine(rng)
        for rid in range(1, 40):
            base = prompt(rng.randrange(1, 12), rng.randrange(3))
            text = base + prompt(rng.randrange(8), rid)
            if self.recurrent and rng.random() < 0.5:
                text += prompt(-len(text) % 4, len(text))  # ends on a page edge, maybe as another does
            engine.submit(rid, text, rng.randrange(1, 16), priority=rng.randrange(2))
            for _ in range(rng.randrange(4)):
                self._step(rng, engine)
            if rng.random() < 0.2:
                engine.abort(rng.randrange(1, rid + 1))
            if rng.random() < 0.05:
                engine.manager.handle_admin(Flush())
        for _ in range(300):
            self._step(rng, engine)
        engine.run()
        assert not [text for text in engine.text.failed.values() if not text.startswith("too_large")]
        if not self.deaths and not self.refusals:
            engine.check_accounts()
        settle(engine)
        return engine

    def _engine(self, rng: random.Random) -> PipelinedEngine:
        k = rng.choice([0, 1, 3, 7, 7])
        engine = PipelinedEngine(
            num_frames=rng.choice([26, 34, 50, 100] if self.recurrent else [18, 26, 40, 90]), k=k, max_running=rng.choice([2, 6]),
            wrong_every=rng.choice([0, 2, 5]), max_prefill=rng.choice([4, 16, 40]), window=rng.choice([0, 0, 4, 16]),
            width=Forced(lambda _step: rng.choice([0, 0, 1, 3, 7])) if k == 7 and rng.random() < 0.6 else None,
            seed=0 if self.is_late else self.seed + 1, recurrent=self.recurrent,
        )  # fmt: skip
        engine.device.on_look = lambda: self._look(rng, engine)
        finish = engine.client.finish_step

        def finish_step():
            stepped, running = finish(), sorted(engine.scheduler._running)
            if running and rng.random() < self.demands:
                return msgspec.structs.replace(stepped, retract=[rng.choice(running)])
            return stepped

        engine.client.finish_step = finish_step
        return engine

    def _look(self, rng: random.Random, engine: PipelinedEngine) -> None:
        if engine.spec is not None:
            if rng.random() < self.deaths:
                engine.spec.die()
            elif rng.random() < self.refusals:
                engine.spec.refuses = True

    def _step(self, rng: random.Random, engine: PipelinedEngine) -> None:
        if engine.spec is not None and rng.random() < 0.3:
            engine.spec.come_back()
        engine.step()
