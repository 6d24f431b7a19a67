"""The two model folders, read and checked against each other before anything is started."""

from dataclasses import dataclass
from pathlib import Path

from draft_worker.config import DraftConfig
from draft_worker.config import kind_specs as draft_kinds
from draft_worker.shape import DraftShape
from launch.config import LaunchConfig
from launch.weight_bytes import stored_fp8
from memsvc.device.delta_limits import MOST_PAGE
from memsvc.device.hf_config import read_config
from memsvc.device.quant_config import is_quantised
from memsvc.wire.mem import KindSpec
from target_worker.model.config import DTYPE_BYTES, TargetShape
from target_worker.model.config import kind_specs as target_kinds
from target_worker.model.fp8_stacks import FP8, Stack, fp8_stacks, stays_fp8
from target_worker.model.wanted import wanted_tensors

WIDTHS = (0, 1, 2, 3, 5, 7, 11, 15)
"""Numbers of drafts that auto chooses from: neighbours differ by about as much as can be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What both shapes come down to for the other processes."""

    target: TargetShape
    """As its folder says."""
    draft: DraftShape | None
    """None without speculation."""
    num_drafts: int
    """k in force, or the most of them; 0 without speculation."""
    widths: tuple[int, ...]
    """The k to choose from, ascending; empty if it is fixed."""
    context_len: int
    """Longest prompt plus answer."""
    kinds: tuple[KindSpec, ...]
    """Pages of the target first, then of the draft."""
    feature_row_bytes: int
    """One token's features in the target's dtype; 0 without speculation."""
    weight_bytes: int
    """What all weight files come to in memory."""
    fp8: frozenset[Stack]
    """Matrices of the target that are kept in fp8."""

    @property
    def block_size(self) -> int:
        """B: rows of a verify block, the anchor included."""
        return 1 + self.num_drafts


def check_folders(config: LaunchConfig, model_path: Path) -> None:
    """Raises ValueError that names, in full, the folder of model or drafter that does not exist."""
    if not model_path.is_dir():
        raise ValueError(f"model folder {model_path} does not exist; names of a model hub are not downloaded")
    drafter = Path(config.draft_model_path).absolute()
    if config.draft_model_path and not drafter.is_dir():
        raise ValueError(f"drafter folder {drafter} does not exist")


def read_models(config: LaunchConfig, model_path: Path) -> Models:
    """Raises ValueError that names the folder, the key, or both numbers where the models don't fit together."""
    target = TargetShape.from_folder(model_path)
    draft = DraftShape.from_folder(config.draft_model_path) if config.draft_model_path else None
    num_drafts = _num_drafts(config, draft)
    if target.linear is None and config.mamba_ssm_dtype != "float32":
        raise ValueError(
            f"--mamba-ssm-dtype is {config.mamba_ssm_dtype}, but {model_path.name} has no recurrent layers"
        )
    kept = (config.kv_cache_dtype, config.mamba_ssm_dtype)
    kinds = target_kinds(target, config.page_size, config.dtype, 1 + num_drafts, *kept)
    row_bytes = 0
    if draft is not None:
        _check_pair(target, draft)
        kinds += draft_kinds(draft, config.page_size, config.dtype, config.draft_kv_cache_dtype)
        row_bytes = draft.feature_width * DTYPE_BYTES[target.resolve_dtype(config.dtype)]
    if config.simulate_accept_length and not 1 <= config.simulate_accept_length <= num_drafts + 1:
        given = config.simulate_accept_length
        raise ValueError(f"--simulate-accept-length is {given}, it must be between 1 and {num_drafts + 1}")
    if config.is_cuda and target.linear is not None and config.page_size > MOST_PAGE:
        raise ValueError(f"--page-size is {config.page_size}, {MOST_PAGE} at most for a hybrid on a CUDA device")
    folders = [model_path, *([Path(config.draft_model_path)] if draft else [])]
    return Models(
        target=target,
        draft=draft,
        num_drafts=num_drafts,
        widths=_widths(config, num_drafts),
        context_len=_context_len(config, target, draft),
        kinds=tuple(kinds),
        feature_row_bytes=row_bytes,
        weight_bytes=sum(_weight_bytes(folder, target.resolve_dtype(config.dtype)) for folder in folders),
        fp8=_fp8(config, target, model_path),
    )


def _fp8(config: LaunchConfig, target: TargetShape, model_path: Path) -> frozenset[Stack]:
    if config.quantization == FP8:
        return fp8_stacks(wanted_tensors(target))
    stays = config.load_format == "auto" and stays_fp8(config.device, target.resolve_dtype(config.dtype))
    return stored_fp8(model_path) if stays else frozenset()


def _weight_bytes(folder: Path, dtype: str) -> int:
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored * DTYPE_BYTES[dtype] if is_quantised(read_config(folder)) else stored


def _num_drafts(config: LaunchConfig, draft: DraftShape | None) -> int:
    if draft is None:
        return 0
    worker = DraftConfig(
        run_dir="", draft_path=config.draft_model_path, target_path="", num_draft_tokens=config.asked_drafts
    )
    return worker.drafts_per_block(draft)


def _widths(config: LaunchConfig, num_drafts: int) -> tuple[int, ...]:
    if not (config.is_auto and num_drafts):
        return ()
    return tuple(sorted(set(config.widths) or {num_drafts, *(width for width in WIDTHS if width <= num_drafts)}))


def _check_pair(target: TargetShape, draft: DraftShape) -> None:
    facts = [
        ("width of a tapped layer", draft.target_hidden_size, target.hidden_size),
        ("vocabulary", draft.vocab_size, target.vocab_size),
        ("depth of the target", draft.num_target_layers or target.num_layers, target.num_layers),
    ]
    for what, wanted, found in facts:
        if wanted != found:
            raise ValueError(f"the drafter was made for another target: {what} is {wanted} there and {found} here")
    deepest = max(draft.target_layer_ids)
    if deepest >= target.num_layers:
        raise ValueError(f"the drafter taps layer {deepest} of a target with layers 0..{target.num_layers - 1}")


def _context_len(config: LaunchConfig, target: TargetShape, draft: DraftShape | None) -> int:
    limits = [target.max_positions, *([draft.max_position_embeddings] if draft else [])]
    if config.context_len > min(limits):
        raise ValueError(f"--context-length is {config.context_len}, the model has {min(limits)} positions")
    return config.context_len or min(limits)
