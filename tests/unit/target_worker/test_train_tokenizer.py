"""The trained tokenizer: its ids, its pieces, and that others read it alike."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from memsvc.wire.text import ChatMessage, ChatPrompt, TextPrompt
from target_worker.train import tokenizer as command
from target_worker.train.corpus import write_corpus
from target_worker.train.documents import Document, clean, is_held_out
from target_worker.train.packages import Tree
from target_worker.train.shards import HELD_OUT, TRAIN, read_documents, read_tokens, write_shards
from target_worker.train.sources import Source
from target_worker.train.tokenizer import SPECIAL_TOKENS, encode, train_tokenizer, write_tokenizer, write_tokens
from tests.support.tiny_tokenizer import training_text
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.decode import TextDecoder
from tokenizer_proc.encode import PromptEncoder

VOCAB = 400
CODE = 'def pour(cup_2):\n    if cup_2:\n        return "caf\u00e9", 2048\n\n\n# end  \n'


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(training_text() + [CODE] * 50, VOCAB)


def documents(num, seed=0):
    rng = random.Random(seed)
    texts = [clean(" ".join("".join(rng.choices("aeklmnost", k=5)) for _ in range(60))) for _ in range(num)]
    return [Document(source=f"s{n % 2}", name=str(n), text=text) for n, text in enumerate(texts)]


def arrays(num, seed=0):
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(1, 8192, 1 + n % 50), 0).astype(np.uint16) for n in range(num)]


def test_special_tokens_come_first_and_bytes_next(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert {len(tokenizer.id_to_token(token_id)) for token_id in range(4, 260)} == {1}


def test_digits_stand_alone_and_an_indentation_is_one_token_apart_from_the_line_end(tokenizer):
    assert tokenizer.encode("2048").tokens == list("2048")
    tokens = tokenizer.encode('        return "x\n').tokens
    assert tokens[0] == "\u0120" * 7
    assert tokens[1].startswith("\u0120")
    # What stands before a line end is the same whether an indented line follows or nothing.
    alone = tokenizer.encode("def pour(cup_2):\n").ids
    assert tokenizer.encode("def pour(cup_2):\n        return").ids[: len(alone)] == alone


def test_too_few_texts_for_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"makes \d+ tokens, --vocab is 8192"):
        train_tokenizer(["a few words"], 8192)


def test_the_server_accepts_the_folder_and_gives_the_text_back(tokenizer, tmp_path):
    write_tokenizer(tokenizer, tmp_path)
    encoder = PromptEncoder(TokenizerConfig(run_dir="", model_path=str(tmp_path), context_len=2048))
    token_ids = encoder.encode(encoder.text_of(TextPrompt(CODE)))
    assert list(token_ids) == tokenizer.encode(CODE).ids
    decoder = TextDecoder(encoder.pieces, at_start=True)
    assert decoder.feed(token_ids) + decoder.flush() == CODE
    messages = [ChatMessage("user", "one"), ChatMessage("assistant", "two")]
    assert encoder.text_of(ChatPrompt(messages)).text == "one\ntwo\n"


def test_transformers_loads_the_folder_and_reads_text_the_same_way(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tokenizer, tmp_path)
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded(CODE)["input_ids"] == tokenizer.encode(CODE).ids
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id) == (0, 0, 1)
    assert loaded.model_max_length == 2048
    assert loaded.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False) == "one\n"


def test_a_special_token_spelled_out_in_a_document_stays_text(tokenizer):
    text = "before <|endoftext|> after <|mask|>"
    (tokens,) = encode(tokenizer, [Document(source="s", name="n", text=text)])
    assert tokens[-1] == 0
    assert tokens[:-1].min() > 3
    assert tokenizer.decode(tokens[:-1].tolist()) == text
    # The tokenizer that is written still knows it.
    assert tokenizer.encode("<|endoftext|>").ids == [0]


def test_each_document_is_in_the_shards_of_its_kind_and_none_is_lost(tokenizer, tmp_path):
    made = documents(600)
    nums = write_tokens(tokenizer, made, tmp_path, 1)
    found = {stem: read_documents(tmp_path, stem) for stem in (TRAIN, HELD_OUT)}
    texts = {stem: [tokenizer.decode(tokens[:-1].tolist()) for tokens in part] for stem, part in found.items()}
    assert all(map(is_held_out, texts[HELD_OUT]))
    assert not any(map(is_held_out, texts[TRAIN]))
    assert len(texts[HELD_OUT]) > 0
    assert sorted(texts[TRAIN] + texts[HELD_OUT]) == sorted(document.text for document in made)
    assert texts[TRAIN] != [document.text for document in made if not document.held_out]
    assert nums["s0"] + nums["s1"] == nums[TRAIN] + nums[HELD_OUT]
    assert nums[TRAIN] == len(read_tokens(tmp_path, TRAIN))


def test_the_order_is_the_seed_s(tokenizer, tmp_path):
    made = documents(50)
    streams = []
    for number, seed in enumerate((1, 1, 2)):
        write_tokens(tokenizer, made, tmp_path / str(number), seed)
        streams.append(read_tokens(tmp_path / str(number), TRAIN))
    assert np.array_equal(streams[0], streams[1])
    assert not np.array_equal(streams[0], streams[2])


def test_shards_come_back_as_they_were_written(tmp_path):
    made = arrays(100)
    (file,) = write_shards(tmp_path, "x", made)
    assert file.name == "x-000.safetensors.xz"
    found = read_documents(tmp_path, "x")
    assert len(found) == 100
    assert all(map(np.array_equal, found, made))
    stream = read_tokens(tmp_path, "x")
    assert stream.dtype == np.uint16
    assert np.array_equal(stream, np.concatenate(made))


def test_no_shard_is_larger_than_asked_for_and_old_ones_go(tmp_path):
    made = arrays(2000)
    files = write_shards(tmp_path, "x", made, 20_000)
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) <= 20_000
    assert all(map(np.array_equal, read_documents(tmp_path, "x"), made))
    write_shards(tmp_path, "x", made[:10])
    assert len(read_documents(tmp_path, "x")) == 10


def test_a_document_too_large_for_a_shard_and_a_missing_shard_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a document of 9000 tokens takes 18008 bytes"):
        write_shards(tmp_path, "x", [np.zeros(9000, np.uint16)], 20_000)
    with pytest.raises(ValueError, match="holds no y-000"):
        read_tokens(tmp_path, "y")


def test_the_command_makes_a_model_folder_and_shards_of_a_corpus(tmp_path, capsys):
    class Package:
        def unpack(self, cache):
            return Tree(root=tmp_path, version="1")

    def read(root):
        yield from ((document.name, document.text) for document in documents(300))

    sources = [Source(name="made-up", licence="MIT", package=Package(), read=read)]
    write_corpus(sources, tmp_path / "corpus", tmp_path, 1 << 20, 0)
    folders = {"--corpus": tmp_path / "corpus", "--out": tmp_path / "model", "--shards": tmp_path / "shards"}
    command.main([str(part) for pair in folders.items() for part in pair] + ["--vocab", "300"])
    assert Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).get_vocab_size() == 300
    stream = read_tokens(tmp_path / "shards", TRAIN)
    assert stream.max() < 300
    shown = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert int(shown["train"]) == len(stream)


def test_a_vocabulary_without_room_for_the_bytes_is_a_usage_error(tmp_path):
    with pytest.raises(SystemExit):
        command.main(["--corpus", str(tmp_path), "--out", str(tmp_path), "--vocab", "100"])
