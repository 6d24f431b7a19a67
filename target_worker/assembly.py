"""The engine on the CPU: one step is computed and read before the next."""

from collections.abc import Callable

import torch

from target_worker.base import Base
from target_worker.executor import Executor
from target_worker.linear_memory import LinearMemory
from target_worker.mem_link import MemLink
from target_worker.pools import kv_pool, page_tables
from target_worker.runner import Runner
from target_worker.scheduler import Links, Scheduler
from target_worker.spec_link import SpecLink
from target_worker.state_link import StateLink


class HostEngine:
    """A Scheduler with all that it needs."""

    def __init__(self, base: Base) -> None:
        """Raises ValueError if layout, model and config do not fit each other, with the numbers."""
        config, layout = base.config, base.layout
        self._runner = _make_runner(base)
        executor = Executor(self._runner, config.simulate_accept_length)
        linear = self._runner.linear
        states = StateLink(layout, linear.table, executor.catch_up) if linear else None
        mem = MemLink(base.client, layout, self._runner.tables, states)
        self._spec = SpecLink(base.spec_rpc(), base.draft_contract()) if config.draft else None
        self._scheduler = Scheduler(config, Links(mem, base.text_link(), self._spec), executor)

    def step(self) -> None:
        """See Engine."""
        self._scheduler.step()

    def watch(self, beat: Callable[[], None]) -> None:
        """See Engine."""
        self._runner.on_layer = beat
        if self._spec is not None:
            self._spec.on_wait = beat

    def lines(self) -> list[str]:
        """See Engine."""
        return []

    def num_device_bytes(self) -> int:
        """See Engine."""
        return 0

    def close(self) -> None:
        """See Engine."""


def _make_runner(base: Base) -> Runner:
    config, layout, model = base.config, base.layout, base.model
    return Runner(
        model,
        kv_pool(base.arena, layout, model.shape, config),
        page_tables(layout, config, base.arena.device),
        _features(base) if config.target_layer_ids else None,
        list(config.target_layer_ids),
        LinearMemory.of_layout(
            base.arena,
            layout,
            model,
            max_reqs=config.max_running_requests,
            block_size=config.block_size,
            state_dtype=config.mamba_ssm_dtype,
        ),
    )


def _features(base: Base) -> torch.Tensor:
    num_bytes, num_rows = base.feature_bytes, base.config.max_step_rows
    if num_bytes > base.layout.exchange_bytes:
        raise ValueError(
            f"features of {num_rows} rows need {num_bytes} bytes, the exchange has {base.layout.exchange_bytes}"
        )
    return base.feature_rows(num_bytes)
