"""`python -m draft_worker.train.questions`: prompts that the target itself writes, one for a user's turn left open.

A chat model that is given its template up to where a user would speak goes on as its users did in its own
training. What it asks is as varied as that, and needs no text of anybody's.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draft_worker.train.config import GenerateConfig, model_folder_help
from draft_worker.train.fused_target import fuse
from draft_worker.train.generate import Answers, Generation
from draft_worker.train.sequences import Sequences, from_lists, write_sequences
from memsvc.device.shards import FILE_BYTES
from memsvc.wire.text import ChatMessage, ChatPrompt
from target_worker.model.config import TargetShape
from target_worker.model.weights import load_target
from target_worker.train.flags import one_line_errors, parse, target_folder
from target_worker.train.start import begin
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder, Text

STEM = "questions"
KIND = 4
"""The number of this kind of source, after those of train.prompts."""
_MARK = "QUESTION"
_LEAST_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens around a user's words in a chat prompt."""

    before: list[int]
    after: list[int]


def frame_of(target: Path) -> Frame:
    """Raises ValueError if the target has no chat template, or one that does something to the user's words."""
    shape = TargetShape.from_folder(target)
    encoder = PromptEncoder(TokenizerConfig(run_dir="", model_path=str(target), context_len=shape.max_positions))
    if encoder.template is None:
        raise ValueError(f"{target} has no chat template: there is no user's turn to leave open")
    whole = encoder.text_of(ChatPrompt([ChatMessage("user", _MARK)]))
    parts = whole.text.split(_MARK)
    if len(parts) != 2:
        raise ValueError(f"the chat template of {target} holds the user's words {len(parts) - 1} times")
    before, after = (list(encoder.encode(Text(text=part, adds_special=False))) for part in parts)
    return Frame(before, after)


def chosen(answers: Answers, frame: Frame, eos_ids: Sequence[int], vocab_size: int) -> Sequences:
    """Prompts of the questions that came to an end, each once, in the order in which they were made."""
    found: dict[tuple[int, ...], None] = {}
    for job, answer in zip(answers.jobs, answers.answers, strict=True):
        if job.temperature and len(answer) > _LEAST_TOKENS and int(answer[-1]) in eos_ids:
            found[tuple(answer[:-1].tolist())] = None
    prompts = [[*frame.before, *question, *frame.after] for question in found]
    return from_lists(prompts, vocab_size, [KIND] * len(prompts))


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print what is in it. --samples is the number of questions to be tried."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker.train.questions", description=__doc__)
    parser.add_argument("--target", required=True, help=model_folder_help())
    parser.add_argument("--out", required=True, type=Path, help="folder of the prompts, beside other files of prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, config = parse(parser, argv, GenerateConfig)
    begin(args.device)
    folder = target_folder(args.target)
    model, shape = load_target(folder, device=args.device)
    frame = frame_of(folder)
    opening = from_lists([frame.before], shape.vocab_size, [KIND])
    prompts = chosen(Generation(fuse(model), opening, config).run(), frame, shape.eos_ids, shape.vocab_size)
    if not len(prompts):
        raise ValueError(f"none of {config.samples} questions came to an end within --max-new {config.max_new} tokens")
    files = write_sequences(args.out, STEM, prompts, FILE_BYTES)
    facts = {
        "prompts": len(prompts),
        "tokens": len(prompts.tokens),
        "mean_len": round(float(np.mean(prompts.lens)), 1),
        "bytes": sum(file.stat().st_size for file in files),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
