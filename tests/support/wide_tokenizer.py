"""A tokenizer with a word for every id, for models with random weights: each token of an answer is some text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPACE = "\u0120"
"""What stands for a space in byte-level BPE."""


def write_wide_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level BPE without merges: the bytes, then " 256", " 257" and on. tokenizer.json in folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ValueError(f"a vocabulary of {vocab_size} does not hold the {len(alphabet)} bytes")
    words = [*alphabet, *(f"{_SPACE}{token_id}" for token_id in range(len(alphabet), vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1 << 20}), encoding="utf-8")
