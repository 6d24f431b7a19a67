"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL = 3
"""GGUF token type of special tokens."""


class Metadata(Protocol):
    """Key-value pairs of a GGUF file."""

    def __getitem__(self, key: str) -> Any: ...

    def get(self, key: str, default: Any = None) -> Any: ...


def build_tokenizer(meta: Metadata) -> Tokenizer:
    """The byte-level BPE that the file describes.

    The file holds the name of the pre-tokenizer, not its rules; they are known here by that name.
    Raises ValueError if the tokenizer is of another family.
    """
    if (family := meta["tokenizer.ggml.model"]) != "gpt2":
        raise ValueError(f"GGUF tokenizer family {family!r}: only byte-level BPE ('gpt2') can be converted")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta["tokenizer.ggml.pre"])
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokens[token_id] for token_id in _special_ids(meta)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    num_tokens = tokenizer.get_vocab_size()
    assert num_tokens == len(tokens), f"{num_tokens} tokens in the tokenizer, {len(tokens)} in the file"
    return tokenizer


def tokenizer_config(meta: Metadata, context_len: int) -> dict[str, object]:
    """tokenizer_config.json: special tokens by role, chat template, length limit."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    config["added_tokens_decoder"] = {
        str(token_id): {
            "content": tokens[token_id],
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token_id in _special_ids(meta)
    }
    return config


def write_tokenizer(meta: Metadata, context_len: int, folder: Path) -> None:
    """Write both files into folder."""
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    config = tokenizer_config(meta, context_len)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _special_ids(meta: Metadata) -> list[int]:
    types: list[int] = meta["tokenizer.ggml.token_type"]
    return [token_id for token_id, kind in enumerate(types) if kind == _CONTROL]


def _pre_tokenizer(name: str) -> PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match name:
        case "smollm":
            # Each digit is a token of its own; without this step numbers are cut in ways the model never saw.
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "gpt-2":
            return byte_level
        case _:
            raise ValueError(f"GGUF pre-tokenizer {name!r} is not known, only 'smollm' and 'gpt-2' are")
