"""Tokenizers are made once for all tests of the package."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.tiny_tokenizer import write_tiny_sentencepiece, write_tiny_tokenizer
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE with a ChatML template."""
    folder = tmp_path_factory.mktemp("chat")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SentencePiece style, without a template."""
    folder = tmp_path_factory.mktemp("plain")
    write_tiny_sentencepiece(folder)
    return folder


@pytest.fixture(scope="session")
def byte_level(chat_folder: Path) -> Tokenizer:
    """The tokenizer in chat_folder."""
    return Tokenizer.from_file(str(chat_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def sentencepiece(plain_folder: Path) -> Tokenizer:
    """The tokenizer in plain_folder."""
    return Tokenizer.from_file(str(plain_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def chat_encoder(chat_folder: Path) -> tuple[PromptEncoder, TokenizerConfig]:
    """An encoder for chat_folder, with a low limit for prompts that are encoded inline."""
    config = TokenizerConfig(run_dir="", model_path=str(chat_folder), context_len=256, inline_chars=100)
    return PromptEncoder(config), config
