"""The real model and what transformers says about it, once per run."""

import os
from pathlib import Path

import pytest

from launch.smollm2 import ensure_smollm2
from launch.smollm2_fetch import FetchError
from tests.support.make_drafter import make_drafter
from tests.support.reference import PROMPTS, Reference, greedy_answers

NUM_PROMPTS = int(os.environ.get("MEMSVC_E2E_PROMPTS", "4"))
"""Prompts that are compared with transformers. 20 is the full run, about five times as long."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where it cannot be had."""
    try:
        return ensure_smollm2()
    except FetchError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def references(smollm2: Path) -> list[Reference]:
    """Greedy fp32 answers of 64 tokens."""
    return greedy_answers(smollm2, PROMPTS[:NUM_PROMPTS], 64)


@pytest.fixture(scope="session")
def random_drafter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlash2 drafter of random weights, B = 8: its drafts are almost never right."""
    return make_drafter(tmp_path_factory.mktemp("drafter") / "random", smollm2)
