"""Which drafter serves a model when the command names none."""

import logging
from dataclasses import replace
from pathlib import Path

from launch.config import NO_SPECULATION, LaunchConfig

logger = logging.getLogger(__name__)

DRAFT_FOLDER = "draft"
"""Subfolder of a model's folder that holds its drafter."""
DEFAULT_MODEL_DRAFT = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct" / DRAFT_FOLDER
"""Comes with a checkout, and is not there where only the packages are installed."""


def with_drafter(config: LaunchConfig, model_path: Path) -> LaunchConfig:
    """config, with the drafter that lies beside its model if it names none and does not turn speculation off.

    One line of the log says which it is, or that there is none. Raises ValueError if there is none and flags ask for
    speculation.
    """
    if config.speculative_algorithm == NO_SPECULATION or config.draft_model_path:
        return config
    folder = model_path / DRAFT_FOLDER if config.model_path else DEFAULT_MODEL_DRAFT
    if (folder / "config.json").is_file():
        logger.info("drafter=%s, found with the model; --speculative-algorithm none serves without it", folder)
        return replace(config, draft_model_path=str(folder))
    if config.asks_for_speculation:
        raise ValueError(f"speculation needs a drafter, and {folder} holds none: --speculative-draft-model-path DIR")
    logger.info("no drafter in %s: serving without speculation", folder)
    return config
