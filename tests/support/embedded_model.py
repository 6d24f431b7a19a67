"""The trained hybrid that comes with the repository, its weights as transformers can read them, and texts to go on."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from memsvc.device.checkpoint import SINGLE_FILE, CheckpointReader
from memsvc.device.hf_config import read_config
from memsvc.device.quant_config import SCALE_SUFFIX

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "models" / "tiny-hybrid"
EMBEDDED_DRAFT = EMBEDDED / "draft"
"""Its drafter: B = 8, window 128."""

OPENINGS = [
    '''"""Which client processes are alive, by pidfd: the kernel says at once when one has ended."""

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

''',
    '''class PagePool:
    """Hands out pages of one size.

    A page is free or has one owner. Pages that nobody has asked for yet are at the end of the list.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))

    def take(self, num: int) -> list[int]:
''',
    """def test_a_page_that_was_freed_is_given_out_again() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    pool.give_back(pages)
    assert pool.num_free == 4

def test_""",
    '''def read_config(path):
    """Read a JSON file and return a dict.

    Raises ValueError if the file is not there.
    """
    with open(path) as f:
        config = json.load(f)
    if not isinstance(config, dict):
        raise''',
    """## Memory

The service owns all of the memory. A worker asks for pages once in each step, and the answer names the pages that it
may write. When a request has ended, its pages stay in the cache until the room is needed for something else. This is
""",
    """    for index, item in enumerate(items):
        if item is None:
            continue
        if index > limit:
            raise ValueError("too many items")
        self.items.append(item)
""",
    '''import argparse
import sys
from pathlib import Path


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument(''',
]
"""Beginnings of programs and of pages about them, in the manner of this repository."""


def write_unpacked(folder: Path) -> Path:
    """The embedded target without quantisation: what its int8 weights stand for, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in read_config(EMBEDDED).items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    with safe_open(str(EMBEDDED / SINGLE_FILE), framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    with CheckpointReader(EMBEDDED) as reader:
        names = [name for name in shapes if not name.endswith(SCALE_SUFFIX)]
        weights = {name: reader.get(name, shapes[name], torch.float32).contiguous() for name in names}
        save_file(weights, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder
