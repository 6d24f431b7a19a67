"""`python -m target_worker.train.tokenizer`: a byte-level BPE of the corpus, and the corpus as its tokens."""

import argparse
import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from target_worker.train.corpus import read_corpus
from target_worker.train.documents import Document
from target_worker.train.shards import HELD_OUT, TRAIN, write_shards

END_OF_TEXT, MASK, IM_START, IM_END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK, IM_START, IM_END)
"""Ids 0 to 3: the end of a document, which is also padding; what a drafter reads at rows to be drafted; two that chat
templates may use. Ids 4 to 259 are the bytes, the rest are merges in their order."""
VOCAB_SIZE = 8192
CONTEXT_LEN = 2048
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
"""The model continues text: a conversation is the text of its messages, line after line."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Letters with the mark or blank before them, single digits, punctuation with its line ends, line ends, blanks.

An indentation is one piece but for its last blank, which the first word of the line has, and is never one with the
line end: so text that ends in a new line can be continued by an indented one.
"""
_BATCH = 256
"""Documents encoded at a time."""

logger = logging.getLogger(__name__)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE with SPECIAL_TOKENS first. Raises ValueError if the texts are too few for vocab_size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus makes {tokenizer.get_vocab_size()} tokens, --vocab is {vocab_size}")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "additional_special_tokens": [IM_START, IM_END],
        "add_prefix_space": False,
        "model_max_length": CONTEXT_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "ascii")


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[np.ndarray]:
    """uint16 tokens of each document and END_OF_TEXT behind them. Special tokens spelled out in a text stay text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, f"the tokenizer has no {END_OF_TEXT}"
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    rest = iter(documents)
    while batch := [document.text for document in islice(rest, _BATCH)]:
        for encoding in plain.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=np.uint16)


def write_tokens(tokenizer: Tokenizer, documents: Sequence[Document], out: Path, seed: int) -> dict[str, int]:
    """Shards of both kinds, the documents in random order; returns the tokens of each kind and source, END_OF_TEXT included."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    parts: dict[str, list[np.ndarray]] = {TRAIN: [], HELD_OUT: []}
    nums: Counter[str] = Counter()
    for document, tokens in zip(order, encode(tokenizer, order), strict=True):
        stem = HELD_OUT if document.held_out else TRAIN
        parts[stem].append(tokens)
        nums[stem] += len(tokens)
        nums[document.source] += len(tokens)
    for stem, part in parts.items():
        for file in write_shards(out, stem, part) if part else ():
            logger.info("shard written file=%s bytes=%d", file.name, file.stat().st_size)
    return dict(nums)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the tokenizer, write it and the tokens, and print how many there are."""
    parser = argparse.ArgumentParser(prog="python -m target_worker.train.tokenizer", description=__doc__)
    parser.add_argument("--corpus", required=True, type=Path, help="folder that train.corpus made")
    parser.add_argument("--out", required=True, type=Path, help="folder of the model: tokenizer files")
    parser.add_argument("--shards", type=Path, help="folder of the tokens (default: --out)")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help=f"tokens (default {VOCAB_SIZE})")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents (default 0)")
    args = parser.parse_args(argv)
    if not len(SPECIAL_TOKENS) + 256 <= args.vocab <= 1 << 16:
        parser.error(
            f"--vocab is {args.vocab}: special tokens and bytes take {len(SPECIAL_TOKENS) + 256}, 16 bits hold 65536"
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    documents = list(read_corpus(args.corpus))
    tokenizer = train_tokenizer((d.text for d in documents if not d.held_out), args.vocab)
    write_tokenizer(tokenizer, args.out)
    logger.info("tokenizer trained vocab=%d documents=%d", args.vocab, len(documents))
    nums = write_tokens(tokenizer, documents, args.shards or args.out, args.seed)
    sizes = Counter[str]()
    for document in documents:
        sizes[document.source] += len(document.text.encode())
        sizes[HELD_OUT if document.held_out else TRAIN] += len(document.text.encode())
    for name, num in sorted(nums.items()):
        print(f"{name:16}{num:>12} tokens{sizes[name]:>12} bytes{sizes[name] / num:>8.3f} bytes a token")


if __name__ == "__main__":
    main()
