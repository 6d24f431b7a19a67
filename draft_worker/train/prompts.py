"""`python -m draft_worker.train.prompts`: a file of prompts, as tokens in the target's chat template.

For a model without one, --openings takes openings of the texts that it was trained on.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from draft_worker.train import prompt_sources
from draft_worker.train.config import PromptConfig, model_folder_help
from draft_worker.train.openings import KIND, openings, write_held_out
from draft_worker.train.sequences import Sequences, from_lists, write_sequences
from memsvc.device.shards import FILE_BYTES
from memsvc.wire.text import ChatMessage, ChatPrompt, TextPrompt
from target_worker.model.config import TargetShape
from target_worker.train.flags import existing, one_line_errors, parse, target_folder
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder

STEM = "prompts"
KINDS = ("maths", "code", "docs", "chat")
"""Kinds of source, by their numbers in the file; openings have one of their own."""


def gather(config: PromptConfig) -> dict[str, list[str]]:
    """Prompts of each kind as texts; maths only where there is a file of it."""
    if config.gsm8k is not None:
        existing("--gsm8k", config.gsm8k)
    rng = random.Random(config.seed)
    stubs, docs = prompt_sources.stubs_and_docs(rng)
    maths = [] if config.gsm8k is None else prompt_sources.maths_prompts(config.gsm8k, config.gsm8k_held_out, rng)
    return {
        "maths": maths,
        "code": prompt_sources.code_prompts(stubs, config.num_code, rng),
        "docs": prompt_sources.doc_prompts(docs, config.num_docs, rng),
        "chat": prompt_sources.chat_prompts(config.num_chat, rng),
    }


def encode(texts: dict[str, list[str]], target: Path, config: PromptConfig) -> Sequences:
    """All of them shuffled, each once, as the server would encode it; those longer than max_prompt are left out."""
    shape = TargetShape.from_folder(target)
    encoder = PromptEncoder(TokenizerConfig(run_dir="", model_path=str(target), context_len=shape.max_positions))
    pairs = list(dict.fromkeys((text, KINDS.index(kind)) for kind, part in texts.items() for text in part))
    random.Random(config.seed + 1).shuffle(pairs)
    tokens, kinds = [], []
    for text, kind in pairs:
        prompt = TextPrompt(text) if encoder.template is None else ChatPrompt([ChatMessage("user", text)])
        token_ids = encoder.encode(encoder.text_of(prompt))
        if len(token_ids) <= config.max_prompt:
            tokens.append(token_ids)
            kinds.append(kind)
    return from_lists(tokens, shape.vocab_size, kinds)


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print how much of what is in it."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.prompts", description=__doc__)
    parser.add_argument("--target", required=True, help=model_folder_help())
    parser.add_argument("--out", required=True, type=Path, help="folder of the prompts")
    args, config = parse(parser, argv, PromptConfig)
    target = target_folder(args.target)
    found = encode(gather(config), target, config) if config.openings is None else openings(target, config)
    if config.held_out_openings:
        write_held_out(target, config)
    files = write_sequences(args.out, STEM, found, FILE_BYTES)
    numbers = {kind: number for number, kind in enumerate(KINDS)} | {"openings": KIND}
    facts = {
        "prompts": len(found),
        "tokens": len(found.tokens),
        "kinds": {kind: int((found.groups == number).sum()) for kind, number in numbers.items()},
        "bytes": sum(file.stat().st_size for file in files),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
