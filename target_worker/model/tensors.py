"""What of a checkpoint is a target's tensors: how its names begin, which are the target's, and what does not fit."""

import re

from memsvc.device.checkpoint import CheckpointReader, Form, TensorSource, listed
from target_worker.model.config import TargetShape
from target_worker.model.linear_spec import LINEAR
from target_worker.model.wanted import PLAIN_ROOT, wanted_tensors

_NESTED = "model.language_model."
"""The root where text is one part of several."""
_OTHER_PARTS = ("mtp.", "model.visual.")
"""Tensors of a hybrid's checkpoint that text needs not: the head for several tokens, the vision tower."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def root_of(shape: TargetShape, source: TensorSource) -> str:
    """The root, as wanted_tensors has it, under which the source holds the text network."""
    # Either is enough: where one is missing, it is to be named as it should be.
    is_nested = any(source.has(f"{_NESTED}{name}.weight") for name in ("embed_tokens", "norm"))
    return _NESTED if shape.is_hybrid_family and is_nested else PLAIN_ROOT


def wanted_of(shape: TargetShape, source: TensorSource) -> dict[str, Form]:
    """wanted_tensors, spelled as the source spells them."""
    root = root_of(shape, source)
    linear = [i for i, kind in enumerate(shape.layer_types) if kind == LINEAR]
    is_fused = any(source.has(f"{root}layers.{i}.linear_attn.in_proj_qkvz.weight") for i in linear)
    return wanted_tensors(shape, root, is_fused=is_fused)


def refuse_misfits(shape: TargetShape, reader: CheckpointReader) -> None:
    """Raise ValueError if a tensor is missing, shaped otherwise or left over, naming the first few of each sort.

    Reads no weights. A tensor that nobody asked for means that the network is not the one we compute; left out on
    purpose are the parts of a hybrid that are no text, and what another tensor repeats.
    """
    wanted, stored = wanted_of(shape, reader), reader.stored()
    missing = [
        f"{name} (wanted {list(form)}{_kind(shape, name)})" for name, form in wanted.items() if name not in stored
    ]
    wrong = [
        f"{name} in {stored[name].file} is {list(stored[name].form)}, the config asks for {list(form)}"
        f"{_kind(shape, name)}"
        for name, form in wanted.items()
        if name in stored and stored[name].form != form
    ]
    extra = [name for name in stored if name not in wanted and not _is_left_out(shape, name)]
    faults = [f"no tensor {listed(missing)}"] if missing else []
    faults += [listed(wrong)] if wrong else []
    faults += [f"{len(extra)} tensors that {shape.architecture} has no use for: {listed(extra)}"] if extra else []
    if faults:
        raise ValueError(f"{reader.folder} has {'; '.join(faults)}")


def _kind(shape: TargetShape, name: str) -> str:
    found = _LAYER.search(name)
    return f", layer {found[1]} is {shape.layer_types[int(found[1])]}" if found else ""


def _is_left_out(shape: TargetShape, name: str) -> bool:
    if shape.is_hybrid_family and name.startswith(_OTHER_PARTS):
        return True
    return name.endswith("rotary_emb.inv_freq") or (shape.tie_word_embeddings and name == "lm_head.weight")
