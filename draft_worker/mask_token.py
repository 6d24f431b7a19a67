"""What stands under the rows to be drafted: a row of the target's embedding, or a vector of the drafter's own."""

from pathlib import Path

import torch
from safetensors import safe_open

from draft_worker.shape import DraftShape
from memsvc.device.hf_config import read_json

SIDE_FILE = "mask_embedding.safetensors"
REFUSED_FILE = "mask_embedding.pt"


def mask_token_id(shape: DraftShape, draft_path: Path, target_path: Path) -> int:
    """The mask token's id, from the config or by its text in the drafter's or the target's tokenizer.json.

    Raises ValueError if neither tokenizer knows the text.
    """
    if shape.mask_token_id >= 0:
        return shape.mask_token_id
    for folder in (draft_path, target_path):
        token_id = _lookup(folder / "tokenizer.json", shape.mask_token)
        if token_id is not None and token_id < shape.vocab_size:
            return token_id
    raise ValueError(
        f"{draft_path}: config.json has no mask_token_id, and no tokenizer.json of drafter or target knows the"
        f" mask token {shape.mask_token!r} as one of {shape.vocab_size} embedding rows"
    )


def _lookup(file: Path, text: str) -> int | None:
    if not file.is_file():
        return None
    tokenizer = read_json(file)
    for token in tokenizer.get("added_tokens") or []:
        if token.get("content") == text:
            return token.get("id")
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(text) if isinstance(vocab, dict) else None


def side_file_embedding(folder: Path, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask vector [width] of mask_embedding.safetensors beside the weights, None if there is no side file.

    Raises ValueError for a pickled side file, which is never read, and for anything but one such vector.
    """
    file = folder / SIDE_FILE
    if not file.is_file():
        if (folder / REFUSED_FILE).exists():
            raise ValueError(
                f"{folder / REFUSED_FILE} is a pickle, which can run code when it is read: save its vector"
                f" [{width}] as the one tensor of {SIDE_FILE} instead"
            )
        return None
    with safe_open(str(file), framework="pt") as opened:
        names = list(opened.keys())
        if len(names) != 1:
            raise ValueError(f"{file} holds {names}, expected one tensor [{width}]")
        vector = opened.get_tensor(names[0])
    if vector.shape not in ((width,), (1, width)) or not vector.dtype.is_floating_point:
        raise ValueError(f"{file}: {names[0]} is {vector.dtype} {list(vector.shape)}, expected floats [{width}]")
    return vector.flatten().to(dtype)
