"""Targets with gated delta net layers in training: against transformers, against each other, and to a drafter's end."""

from typing import Any

import numpy as np
import pytest
import torch

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.train.config import DrafterConfig, GenerateConfig
from draft_worker.train.decode import BatchDecoder
from draft_worker.train.fused_target import fuse, is_plain
from draft_worker.train.generate import Generation
from draft_worker.train.plot import read_log
from draft_worker.train.sequences import from_lists
from draft_worker.train.target import FrozenTarget
from draft_worker.train.trainer import LOG_FILE
from draft_worker.weights import load_model
from target_worker.model.weights import load_target
from tests.support.never_waits import never_waits
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import oracle_logits, tokens_of
from tests.support.train_rig import NO_FILTER, VOCAB, make_hybrid_run, make_trainer

LENS = [1, 70, 5, 2, 33, 64, 3, 130, 1, 9, 40, 65]
MAX_NEW = 20
VARIANTS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True, "full_attention_interval": 2},
    {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3},
    {"nested": True, "linear_key_head_dim": 8, "linear_value_head_dim": 24},
    {"family": "Qwen3Next", "num_experts": 0, "linear_value_head_dim": 16},
]


EMBEDDED: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""Sizes of the model that comes with the project, half as deep."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    oracle = make_hybrid(folder)
    return oracle, folder, load_target(folder)[0]


def padded(sequences):
    """[n, T] with zeros past the ends."""
    tokens = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens


def read_logits(model, sequences):
    """Of each sequence [len, vocab], all read at once."""
    tokens = padded(sequences)
    _, hidden = FrozenTarget(model, ()).read(tokens)
    logits = model.logits(hidden).float().view(*tokens.shape, -1)
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences, strict=True)]


def close(got, want, atol=1e-4):
    assert got.shape == want.shape
    assert want.std() > 0.3, "logits too flat to tell anything"
    assert (got - want).abs().max().item() <= atol


def test_whole_sequences_are_read_as_transformers_reads_them_whatever_stands_beside_them(hybrid):
    oracle, _, model = hybrid
    sequences = [tokens_of(seed, num) for seed, num in enumerate([90, 7, 1, 64, 65, 130, 33])]
    for got, sequence in zip(read_logits(model, sequences), sequences, strict=True):
        close(got, oracle_logits(oracle, sequence))
    for got, sequence in zip(read_logits(model, sequences[1:3]), sequences[1:3], strict=True):
        close(got, oracle_logits(oracle, sequence))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_every_config_is_read_as_transformers_reads_it(overrides, tmp_path):
    oracle = make_hybrid(tmp_path, **overrides)
    sequences = [tokens_of(1, 90), tokens_of(2, 20)]
    for got, sequence in zip(read_logits(load_target(tmp_path)[0], sequences), sequences, strict=True):
        close(got, oracle_logits(oracle, sequence))


def test_features_are_the_outputs_of_the_tapped_layers(hybrid):
    oracle, _, model = hybrid
    tokens = torch.tensor([tokens_of(1, 70), tokens_of(2, 70)])
    features, _ = FrozenTarget(model, (0, 2)).read(tokens)
    with torch.no_grad():
        states = oracle.model(tokens, output_hidden_states=True).hidden_states
    want = torch.cat([states[1], states[3]], dim=2).flatten(0, 1)
    assert torch.allclose(features, want, atol=1e-4)


def test_in_bfloat16_reading_rounds_where_serving_rounds(hybrid):
    oracle, folder, _ = hybrid
    rig = HybridRig(folder, dtype="bfloat16", num_frames=800)
    sequences = [tokens_of(1, 90), tokens_of(2, 20)]
    for number, (got, tokens) in enumerate(zip(read_logits(rig.model, sequences), sequences, strict=True)):
        want = oracle_logits(oracle, tokens)
        served = rig.chunk(rig.open(number, len(tokens)), tokens)
        assert (got - served).abs().mean() <= 0.2 * (served - want).abs().mean()


def generated(oracle, prompt):
    """By transformers."""
    with torch.no_grad():
        found = oracle.generate(torch.tensor([prompt.tolist()]), max_new_tokens=MAX_NEW, do_sample=False)
    return found[0].tolist()


def test_greedy_answers_are_those_of_transformers_whatever_slot_they_run_in(hybrid):
    oracle, _, model = hybrid
    prompts = from_lists([tokens_of(seed, num) for seed, num in enumerate(LENS)], VOCAB, [0] * len(LENS))
    # Fewer slots than prompts, and a sampled answer to each between them: every slot is refilled.
    config = GenerateConfig(slots=5, max_new=MAX_NEW, refill_every=3, **NO_FILTER)
    answers = Generation(model, prompts, config).run().sequences()
    assert len(answers) == 2 * len(LENS)
    greedy = [index for index in range(len(answers)) if answers.temperatures[index] == 0]
    found = [answers[index].tolist() for index in greedy]
    assert len({len(answer) for answer in found}) > 3
    for index, answer in zip(greedy, found, strict=True):
        assert answer == generated(oracle, prompts[int(answers.groups[index])])
    for index, answer, logits in zip(greedy, found, read_logits(model, found), strict=True):
        start = int(answers.prompt_lens[index])
        assert logits[start - 1 : -1].argmax(-1).tolist() == answer[start:]


def test_slots_that_are_not_alive_change_no_bit_of_what_they_hold(hybrid):
    model = hybrid[2]
    decoder = BatchDecoder(model, slots=3, max_len=64, max_new=8)
    prompts = [np.array(tokens_of(seed, num)) for seed, num in enumerate([9, 1, 30])]
    decoder.fill([0, 1, 2], prompts, [0.0] * 3)
    memory = decoder._states
    assert memory is not None
    before = memory.states.clone(), memory.windows.clone()
    # As the warm-up steps of a capture find it.
    decoder.alive.zero_()
    decoder.run(3)
    assert torch.equal(memory.states, before[0])
    assert torch.equal(memory.windows, before[1])
    decoder.alive[2] = True
    decoder.run(2)
    assert torch.equal(memory.states[:, :2], before[0][:, :2])
    assert torch.equal(memory.windows[:, :2], before[1][:, :2])
    assert not torch.equal(memory.states[:, 2], before[0][:, 2])
    assert not before[0][:, 1].any()


def test_nothing_of_an_answer_is_left_where_a_prompt_of_one_token_begins(hybrid):
    decoder = BatchDecoder(hybrid[2], slots=2, max_len=64, max_new=8)
    decoder.fill([0, 1], [np.array(tokens_of(1, 9)), np.array(tokens_of(2, 12))], [0.0] * 2)
    decoder.run(3)
    memory = decoder._states
    assert memory is not None
    assert all(part[:, slot].any() for part in (memory.states, memory.windows) for slot in (0, 1))
    decoder.fill([1], [np.array([7])], [0.0])
    assert not memory.states[:, 1].any()
    assert not memory.windows[:, 1].any()
    assert memory.states[:, 0].any()


def test_a_hybrid_is_not_taken_for_a_target_of_plain_layers(hybrid):
    model = hybrid[2]
    assert fuse(model) is model
    assert not any(is_plain(layer) for layer in model.layers)


def test_a_drafter_for_a_hybrid_learns_and_loads_where_drafts_are_served(tmp_path):
    paths = make_hybrid_run(tmp_path)
    make_trainer(paths, steps=60, lr=5e-3).run()
    log = read_log(paths.state / LOG_FILE)
    losses = [entry["loss"] for entry in log["step"]]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert log["held_out"][-1]["accept_length_greedy"] >= 1.0
    config = DraftConfig(run_dir="", draft_path=str(paths.out), target_path=str(paths.target), dtype="float32")
    assert load_model(config, DraftShape.from_folder(paths.out)).selector is not None


def test_a_drafter_of_the_embedded_models_size_takes_steps_with_a_head_of_the_whole_vocabulary(tmp_path):
    paths = make_hybrid_run(tmp_path, **EMBEDDED)
    drafter = DrafterConfig(
        layers=2, num_taps=2, block_rows=8, window=128, draft_vocab=0, rank=16, top_k=16, mask_token_id=3
    )
    made = make_trainer(paths, drafter, steps=4, lr=5e-3, warmup_steps=1, log_every=1)
    made.run()
    losses = [entry["loss"] for entry in read_log(paths.state / LOG_FILE)["step"]]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    config = DraftConfig(run_dir="", draft_path=str(paths.out), target_path=str(paths.target), dtype="float32")
    shape = DraftShape.from_folder(paths.out)
    model = load_model(config, shape)
    assert model.draft_to_target is None
    assert len(model.head) == 8192
    assert {layer.window for layer in shape.layers} == {128}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reading_never_waits_for_the_gpu_and_is_as_exact_there(hybrid):
    oracle, folder, _ = hybrid
    model, _ = load_target(folder, "bfloat16", device="cuda")
    sequences = [tokens_of(seed, num) for seed, num in enumerate([90, 20, 200])]
    target, tokens = FrozenTarget(model, (0, 2)), padded(sequences).cuda()
    target.read(tokens)
    with never_waits():
        target.read(tokens)
    on_cpu = read_logits(load_target(folder, "bfloat16")[0], sequences)
    _, hidden = target.read(tokens)
    logits = model.logits(hidden).float().cpu().view(*tokens.shape, -1)
    for got, other, sequence in zip(logits, on_cpu, sequences, strict=True):
        want = oracle_logits(oracle, sequence)
        assert (got[: len(sequence)] - want).abs().mean() <= 1.5 * (other - want).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_captured_step_answers_as_the_plain_one_does(hybrid):
    model, _ = load_target(hybrid[1], "bfloat16", device="cuda")

    def answers(captured):
        decoder = BatchDecoder(model, slots=4, max_len=200, max_new=24)
        if not captured:
            decoder._replay = decoder._step
        found = []
        for part in (LENS[:4], LENS[4:8], LENS[8:]):
            prompts = [np.array(tokens_of(num, num)) for num in part]
            decoder.fill(list(range(4)), prompts, [0.0] * 4)
            decoder.run(24)
            found += [row[:num].tolist() for row, num in zip(decoder.answers, decoder.num_new.tolist(), strict=True)]
        return found

    assert answers(captured=True) == answers(captured=False)
