"""Folders of a tiny random model with tokenizer and drafter, for servers that start in seconds."""

from pathlib import Path

from tests.support.make_drafter import make_drafter
from tests.support.tiny_target import make_target
from tests.support.tiny_tokenizer import write_tiny_tokenizer

VOCAB = 512
CONTEXT = 1024

WORDS = [
    "the",
    "quiet",
    "river",
    "carried",
    "a",
    "small",
    "red",
    "boat",
    "past",
    "seven",
    "old",
    "bridges",
    "while",
    "two",
    "children",
    "counted",
    "birds",
]


def write_tiny_model(folder: Path) -> Path:
    """A Llama of three layers whose text is noise, but always the same noise."""
    folder.mkdir(parents=True, exist_ok=True)
    make_target(folder, "Llama", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=2)
    write_tiny_tokenizer(folder, VOCAB, CONTEXT)
    return folder


def write_tiny_drafter(folder: Path, target: Path, **overrides: object) -> Path:
    """A random DFlash2 drafter for it, B = 4 unless overridden."""
    options = {"block_size": 4, "target_layer_ids": [0, 1, 2], "num_hidden_layers": 2} | overrides
    layers = ["sliding_attention"] * int(options["num_hidden_layers"])  # type: ignore[call-overload]
    return make_drafter(folder, target, layer_types=layers, **options)


def prompt(seed: int, num_words: int) -> str:
    """num_words words that differ by seed."""
    return " ".join(WORDS[(seed * 7 + index * (1 + seed % 5)) % len(WORDS)] for index in range(num_words))
