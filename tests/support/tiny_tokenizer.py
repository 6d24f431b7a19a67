"""Small real tokenizers, trained in the test that needs one, in the form of a Hugging Face folder."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Ids 0, 1 and 2 of the byte-level tokenizer; IM_END ends an answer."""
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPACE_MARK = "\u2581"
_SYLLABLES = ("ka", "lo", "mi", "ren", "sta", "tor", "un", "ver", "el", "ing", "the", "an", "d", "qu", "ox", "pre")


def training_text(num_lines: int = 400) -> list[str]:
    """The same lines of made-up words, numbers, code and a few other scripts each time."""
    rng = random.Random(7)
    lines = []
    for number in range(num_lines):
        words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(4, 12))]
        lines.append(
            f"{' '.join(words)}, {number * 37}. caf\u00e9 \u4f60\u597d \U0001f600\n    return x[{number}] ** 2"
        )
    return lines


def write_tiny_tokenizer(folder: Path, vocab_size: int = 512, context_len: int = 1024) -> Tokenizer:
    """Byte-level BPE with ChatML tokens and template: tokenizer.json and tokenizer_config.json in folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "model_max_length": context_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }
    _write(tokenizer, config, folder)
    return tokenizer


def write_tiny_sentencepiece(folder: Path, vocab_size: int = 400, context_len: int = 1024) -> Tokenizer:
    """BPE in the style of SentencePiece with byte fallback, as Llama 2 has it; no chat template."""
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    base.pre_tokenizer = pre_tokenizers.Split(_SPACE_MARK, "merged_with_next")
    base.train_from_iterator(training_text(), trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    model = json.loads(base.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK), normalizers.Replace(" ", _SPACE_MARK)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "model_max_length": context_len}
    _write(tokenizer, config, folder)
    return tokenizer


def _write(tokenizer: Tokenizer, config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
