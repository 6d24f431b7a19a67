"""What every training run can be told. No torch here."""

from dataclasses import dataclass

ADAMW, MUON = "adamw", "muon"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How to train. The same data, seed, steps and device give the same weights, however the run is sliced."""

    steps: int = 0
    """Optimiser steps in all; 0: decided by time or passes, or what a run that goes on was told before."""
    fit_seconds: float = 0.0
    """Above 0: the first slice measures its speed and fixes the steps that fit into so many seconds in all."""
    max_seconds: float = 0.0
    """This slice saves and ends after so long; 0 = no limit."""
    optimizer: str = ADAMW
    """Of matrices: adamw or muon; the rest has AdamW."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 200
    """Steps to the peak; a cosine goes from there to a hundredth of it."""
    weight_decay: float = 0.01
    """On matrices; the rest has none."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of first weights, order and what is drawn."""
    log_every: int = 20
    """Steps between lines of the log."""
    eval_every: int = 1000
    """Steps between measurements on what is held out; one more stands at the end of each slice."""

    def __post_init__(self) -> None:
        self._check_counts("warmup_steps", "log_every", "eval_every")
        if self.optimizer not in (ADAMW, MUON):
            raise ValueError(f"--optimizer is {self.optimizer}, known are {ADAMW} and {MUON}")
        if self.lr <= 0 or self.clip <= 0:
            raise ValueError(f"--lr {self.lr} and --clip {self.clip} must be above 0")

    def _check_counts(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")
