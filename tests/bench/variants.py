"""Settings to be compared in one run: named changes of module constants and of a step before it is captured.

    attention-tile=BLOCK,WARPS,STAGES,PROGRAMS   of block attention
    delta-tile=COLUMNS,WARPS[,REGISTERS]         of a hybrid target's states, in every bucket
    set=memsvc.some.module.NAME=VALUE            any module constant, VALUE a Python literal
    attention-tile=64,4,3,2+set=...              several at a time

A new one is a function of its value, in KNOBS.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile, padded_rows
from memsvc.device.kernels.delta_site import DeltaTile
from memsvc.device.kernels.delta_states import LEAST
from target_worker.cuda.verify_step import VerifyStep

BASE = "base"
"""The name of no change at all."""


class UnknownSettingError(ValueError):
    """A setting that this code does not have, or a value that it can't take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One change."""

    constants: tuple[tuple[ModuleType, str, Any], ...] = ()
    """(module, name, value): in force while the variant is captured and run."""
    on_verify: Callable[[VerifyStep], None] = lambda step: None
    """Changes a step that is not captured yet."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and what it changes."""

    name: str
    settings: tuple[Setting, ...] = ()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Its constants are set; afterwards they are what they were."""
        with ExitStack() as stack:
            for setting in self.settings:
                for module, name, value in setting.constants:
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
            yield

    def change(self, step: VerifyStep) -> None:
        """Change a step before its capture."""
        for setting in self.settings:
            setting.on_verify(step)


def parse_variant(text: str) -> Variant:
    """One of the command line. Raises UnknownSettingError, which says what is wrong."""
    if text == BASE:
        return Variant(BASE)
    settings = []
    for part in text.split("+"):
        name, _, value = part.partition("=")
        if name not in KNOBS:
            raise UnknownSettingError(f"{name!r} is none of {', '.join(KNOBS)}")
        settings.append(KNOBS[name](value))
    return Variant(text, tuple(settings))


def _constant(value: str) -> Setting:
    path, _, literal = value.partition("=")
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        before = getattr(module, name)
        wanted = ast.literal_eval(literal)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise UnknownSettingError(f"set={value}: {type(error).__name__}: {error}") from error
    if type(before) is not type(wanted):
        raise UnknownSettingError(f"{path} is {before!r:.80}, {literal} is of another type")
    return Setting(constants=((module, name, wanted),))


def _attention_tile(value: str) -> Setting:
    try:
        block, warps, stages, programs = (int(part) for part in value.split(","))
    except ValueError as error:
        raise UnknownSettingError(f"attention-tile={value}: BLOCK,WARPS,STAGES,PROGRAMS are wanted") from error
    if block < 16 or block & (block - 1) or warps not in (1, 2, 4, 8, 16) or min(stages, programs) < 1:
        raise UnknownSettingError(f"attention-tile={value}: no kernel is cut like this")
    tile = Tile(block, warps, stages, programs)
    return Setting(on_verify=lambda step: _set_tile(step, tile))


def _set_tile(step: VerifyStep, tile: Tile) -> None:
    """With room for as many parts as the tile asks for."""
    old = step._attention
    _, rows, head_dim = old.partial.shape
    shape, config = step._network.model.shape, step._config
    units = shape.num_kv_heads * padded_rows(config.block_size * shape.group_size)[1]
    most = -(-tile.programs * old._num_multiprocessors // units)
    step._attention = AttentionScratch(
        config.max_places, config.block_size, rows // config.block_size, head_dim,
        max(most, old.num_chunks - old.num_places + 1), old.partial.device,
    )  # fmt: skip
    step._attention.tile = tile


def _delta_tile(value: str) -> Setting:
    try:
        columns, warps, *rest = (int(part) for part in value.split(","))
        (registers,) = rest or (None,)
    except ValueError as error:
        raise UnknownSettingError(f"delta-tile={value}: COLUMNS,WARPS[,REGISTERS] are wanted") from error
    is_odd = columns < LEAST.value or columns & (columns - 1) or warps not in (1, 2, 4, 8, 16)
    if is_odd or not (registers is None or 24 <= registers <= 255):
        raise UnknownSettingError(f"delta-tile={value}: no kernel is cut like this")
    return Setting(on_verify=lambda step: _set_delta_tile(step, DeltaTile(columns, warps, registers=registers)))


def _set_delta_tile(step: VerifyStep, tile: DeltaTile) -> None:
    states = step._memory.states
    if states is None:
        raise UnknownSettingError("delta-tile is for hybrid targets, this one has no states")
    states.sites[:] = [replace(site, tile=tile) for site in states.sites]


KNOBS: dict[str, Callable[[str], Setting]] = {
    "attention-tile": _attention_tile,
    "delta-tile": _delta_tile,
    "set": _constant,
}
"""What may stand in a variant's name, before an equals sign."""
