"""Which attention runs: what each backend can do, an explicit choice checked against it, and `auto` from a table.

The registry knows no backend's code: workers offer what they have (theirs, or kernels of memsvc.device), each with a
callable of their own choosing, and get back the one that fits a case.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import torch

from memsvc.device.fp8 import E4M3

__all__ = [
    "ASKED",
    "AUTO",
    "BACKENDS",
    "CHOICES",
    "TORCH",
    "TRITON",
    "Abilities",
    "AttentionBackends",
    "AttentionCase",
    "RowSpan",
    "Rule",
    "Use",
]

AUTO = "auto"
ASKED = {"torch": ("torch",), "triton": ("triton",), "flashinfer": ("flashinfer-fa3", "flashinfer-fa2")}
"""A name that can be asked for -> the backends it stands for, in order of preference."""
BACKENDS = tuple(name for names in ASKED.values() for name in names)
CHOICES = (AUTO, *ASKED)
"""Values of --attention-backend."""

Made = TypeVar("Made")


class Use(StrEnum):
    """When attention is called."""

    GRAPH = "graph"
    """Captured: lengths and pages are read on the device, and the host plans nothing."""
    EAGER = "eager"
    """Called by the host, which knows all lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """One kind of call, as it is known when a worker starts."""

    use: Use
    device: str
    """Type of device: cpu or cuda."""
    dtype: torch.dtype
    """Of rows, and of pages unless kv_dtype says otherwise."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_rows: int
    """Rows a request, at most."""
    causal: bool = True
    window: int = 0
    sink: bool = False
    capability: int = 0
    """Compute capability of a CUDA device, the major number: 9 is Hopper. 0 elsewhere."""
    kv_dtype: torch.dtype | None = None
    """Of pages; None: that of rows."""

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_dtype(self) -> torch.dtype:
        """Of pages."""
        return self.kv_dtype or self.dtype


class RowSpan(Protocol):
    """Rows [first, first + num) of a batch are tokens [start, start + num) of page-table row table_row."""

    @property
    def table_row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def num(self) -> int: ...
    @property
    def first(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What a backend can do. An empty set of values means any."""

    uses: frozenset[Use]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = frozenset()
    head_dims: frozenset[int] = frozenset()
    max_head_dim: int = 512
    page_sizes: frozenset[int] = frozenset()
    capabilities: frozenset[int] = frozenset()
    not_causal: bool = True
    sinks: bool = True
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    """Of pages that are not in the dtype of rows: here an empty set means none."""
    missing: Callable[[AttentionCase], str | None] = lambda case: None
    """What this machine lacks for the case, or None."""

    def refusals(self, case: AttentionCase) -> list[str]:
        """Why the case can't be served, each with the value asked for; empty if it can."""
        found = [
            f"{name} {value} is not among {', '.join(sorted(map(str, known)))}"
            for name, value, known in (
                ("use", case.use, self.uses),
                ("device", case.device, self.devices),
                ("dtype", case.dtype, self.dtypes),
                ("head_dim", case.head_dim, self.head_dims),
                ("page size", case.page_size, self.page_sizes),
                ("compute capability", case.capability, self.capabilities),
            )
            if known and value not in known
        ]
        if case.page_dtype != case.dtype and case.page_dtype not in self.kv_dtypes:
            found.append(f"pages of {case.page_dtype} for rows of {case.dtype} are not supported")
        if case.head_dim > self.max_head_dim:
            found.append(f"head_dim {case.head_dim} is above {self.max_head_dim}")
        if not case.causal and not self.not_causal:
            found.append("rows that see later rows are not supported")
        if case.sink and not self.sinks:
            found.append("attention sinks are not supported")
        # Asked last: it may look at files, in vain if the shape is refused.
        if not found and (lacks := self.missing(case)):
            found.append(lacks)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A line of the table behind `auto`: for cases like this, backends in order of preference."""

    use: Use
    device: str
    order: tuple[str, ...]
    source: str
    """Where the order comes from: a file of measurements, or the reason why there is nothing to measure."""
    head_dims: frozenset[int] = frozenset()
    max_rows: int = 0
    """Rows a request times query heads a key-value head, at most; 0 is any number."""

    def fits(self, case: AttentionCase) -> bool:
        """The case is like this."""
        return (
            (self.use, self.device) == (case.use, case.device)
            and (not self.head_dims or case.head_dim in self.head_dims)
            and (not self.max_rows or case.num_rows * case.group <= self.max_rows)
        )


RULES = (
    Rule(use=Use.GRAPH, device="cuda", order=("triton",), source="no other backend reads the lengths on the device"),
    Rule(use=Use.EAGER, device="cpu", order=("torch",), source="the others need a CUDA device"),
    Rule(
        use=Use.EAGER,
        device="cuda",
        order=("flashinfer-fa3", "triton", "flashinfer-fa2", "torch"),
        source="docs/benchmarks/attention-h200.json, prompts with heads of 128; other cases and devices follow it",
    ),
)
"""The first rule that fits is used. `python -m tests.bench.attention` gives the figures for narrower ones."""


def _lacks_triton(case: AttentionCase) -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed"


TORCH = Abilities(uses=frozenset({Use.EAGER}), devices=frozenset({"cpu", "cuda"}), kv_dtypes=frozenset({E4M3}))
"""Of the workers' reference attention, which gathers pages by a plan of the host."""
TRITON = Abilities(
    uses=frozenset({Use.GRAPH, Use.EAGER}),
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    kv_dtypes=frozenset({E4M3}),
    missing=_lacks_triton,
)
"""Of memsvc.device.kernels.block_attention and prefill_attention."""


class AttentionBackends(Generic[Made]):
    """The backends a worker has, and the choice among them."""

    def __init__(self, rules: tuple[Rule, ...] = RULES) -> None:
        self._rules = rules
        self._offers: dict[str, tuple[Abilities, Made]] = {}

    def offer(self, name: str, abilities: Abilities, made: Made) -> None:
        """Take a backend in. made is handed out by choose."""
        assert name in BACKENDS, f"{name} is not one of {BACKENDS}"
        assert name not in self._offers, f"{name} was offered before"
        self._offers[name] = (abilities, made)

    def choose(self, requested: str, case: AttentionCase) -> tuple[str, Made]:
        """(name, made) of the backend for a case. requested: one of CHOICES.

        Raises ValueError if the one requested can't serve the case, or none can, and says why.
        """
        if requested not in CHOICES:
            raise ValueError(f"attention backend {requested!r} is not known; known are {', '.join(CHOICES)}")
        order = ASKED[requested] if requested != AUTO else self._order(case)
        refused = []
        for name in order:
            reasons = self._refusals(name, case)
            if not reasons:
                return name, self._offers[name][1]
            refused.append(f"{name}: {', '.join(reasons)}")
        raise ValueError(f"no attention for {case}. {'; '.join(refused) or 'No rule is for such a case.'}")

    def able(self, case: AttentionCase) -> list[str]:
        """Names of all that can serve a case."""
        return [name for name in self._offers if not self._refusals(name, case)]

    def _order(self, case: AttentionCase) -> tuple[str, ...]:
        return next((rule.order for rule in self._rules if rule.fits(case)), ())

    def _refusals(self, name: str, case: AttentionCase) -> list[str]:
        if name not in self._offers:
            return ["not offered by this worker"]
        return self._offers[name][0].refusals(case)
