"""Models that benches serve by name or folder, and the flags of `python -m launch` for them and their drafters."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draft_worker.train.evaluate import with_width
from launch.drafter import DEFAULT_MODEL_DRAFT, DRAFT_FOLDER
from target_worker.train.flags import SMOLLM2, target_folder

TINY_HYBRID = "tiny-hybrid"
NO_DRAFT = "none"
TARGET_HELP = f"Hugging Face folder, {SMOLLM2} for the default model, or {TINY_HYBRID} for the one in models/"
DRAFT_HELP = f"folder of the drafter, or {NO_DRAFT}; left out, the one that comes with the target"

_MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Where target and drafter are."""

    folder: Path
    draft: Path | None
    """None: it is served without speculation."""

    def flags(self, more: Sequence[str]) -> list[str]:
        """Of `python -m launch`: the models and `more`, with blocks as long as the drafter's unless `more` says."""
        flags = ["--model-path", str(self.folder)]
        if self.draft is None:
            return [*flags, "--speculative-algorithm", "none", *more]
        return [*flags, "--speculative-draft-model-path", str(self.draft), *with_width(self.draft, more)]


def find_model(target: str, draft: str = "") -> ServedModel:
    """What TARGET_HELP and DRAFT_HELP say. Raises ValueError naming the folder that is no model."""
    folder = _MODELS / TINY_HYBRID if target == TINY_HYBRID else target_folder(target)
    if draft == NO_DRAFT:
        return ServedModel(folder=folder, draft=None)
    beside = DEFAULT_MODEL_DRAFT if target == SMOLLM2 else folder / DRAFT_FOLDER
    chosen = Path(draft) if draft else beside
    if not (chosen / "config.json").is_file():
        if draft:
            raise ValueError(f"{draft} holds no config.json: --draft takes the folder of a drafter or {NO_DRAFT}")
        return ServedModel(folder=folder, draft=None)
    return ServedModel(folder=folder, draft=chosen)
