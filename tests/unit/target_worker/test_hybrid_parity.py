"""The hybrid decoder against transformers: every config, every way to cut a sequence into forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from target_worker.runner import Segment
from tests.support.tiny_hybrid import HybridRig, edit_config, make_hybrid
from tests.support.tiny_target import oracle_logits, tokens_of

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "full_attention_interval": 2},
    {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    {"linear_num_key_heads": 1, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 24},
    {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3},
    {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    {"nested": True},
    {"nested": True, "tie_word_embeddings": True},
    {"family": "Qwen3Next", "num_experts": 0},
]  # fmt: skip


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert want.std() > 0.3, "logits too flat to tell anything"
    assert (got - want).abs().max().item() <= 1e-4


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return make_hybrid(folder), folder


@pytest.mark.parametrize("overrides", VARIANTS)
def test_logits_equal_transformers_for_every_config(overrides: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_hybrid(tmp_path, **overrides)
    rig = HybridRig(tmp_path)
    tokens = tokens_of(1, 90)
    want = oracle_logits(oracle, tokens)
    req = rig.open(1, 90)
    close(rig.chunk(req, tokens), want)
    req = rig.open(2, 90)
    close(torch.cat([rig.chunk(req, tokens[:40]), rig.chunk(req, tokens[40:])]), want)


def test_the_interval_says_the_same_as_the_list_of_layers(tmp_path: Path) -> None:
    oracle = make_hybrid(tmp_path, full_attention_interval=2)
    edit_config(tmp_path, layer_types=None, full_attention_interval=2)
    rig = HybridRig(tmp_path)
    assert rig.shape.layer_types == ("linear_attention", "full_attention") * 2
    tokens = tokens_of(2, 30)
    close(rig.chunk(rig.open(1, 30), tokens), oracle_logits(oracle, tokens))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 31])
def test_a_prompt_in_chunks_equals_the_whole(hybrid: tuple[Any, Path], chunk: int) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    tokens = tokens_of(3, 62)
    req = rig.open(1, 62)
    got = [rig.chunk(req, tokens[i : i + chunk]) for i in range(0, 62, chunk)]
    close(torch.cat(got), oracle_logits(oracle, tokens))


def test_a_prompt_of_many_chunks_of_the_rule_equals_the_whole(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    tokens = tokens_of(4, 330)
    req = rig.open(1, 330)
    close(torch.cat([rig.chunk(req, tokens[:290]), rig.chunk(req, tokens[290:])]), oracle_logits(oracle, tokens))


def test_one_forward_mixes_prompts_blocks_and_single_tokens(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    # length, computed before, how many rows of the last forward are certain
    cases = {
        1: (61, 60, 1),
        2: (9, 1, 8),
        3: (30, 25, 1),
        4: (12, 0, 12),
        5: (70, 20, 50),
        6: (33, 28, 1),
        7: (24, 23, 1),
    }
    seqs = {rid: tokens_of(10 + rid, case[0]) for rid, case in cases.items()}
    reqs = {rid: rig.open(rid, case[0]) for rid, case in cases.items()}
    for rid, (_, done, _) in cases.items():
        for i in range(0, done, 13):
            rig.chunk(reqs[rid], seqs[rid][i : min(i + 13, done)])
    order = [3, 1, 5, 2, 7, 4, 6]
    segments = [rig.segment(reqs[rid], seqs[rid][cases[rid][1] :], certain=cases[rid][2]) for rid in order]
    got = rig.runner.forward(segments).float()
    close(got, torch.cat([oracle_logits(oracle, seqs[rid])[cases[rid][1] :] for rid in order]))


def test_greedy_text_equals_transformers_generate(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder)
    for seed in range(8):
        prompt = tokens_of(seed, 3 + 5 * seed)
        want = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        req = rig.open(seed, len(want) + rig.block)
        tokens = [*prompt, int(rig.chunk(req, prompt)[-1].argmax())]
        while len(tokens) < len(want):
            known = len(tokens) - 1
            # Drafts that are right up to some place, so that blocks are accepted in part.
            drafts = want[known + 1 : known + 1 + len(tokens) % rig.block]
            block = ([tokens[-1], *drafts] + [5] * rig.block)[: rig.block]
            picked = rig.verify(req, block, 0).argmax(-1).tolist()
            accepted = 0
            while accepted < rig.block - 1 and picked[accepted] == block[accepted + 1]:
                accepted += 1
            req.tokens = req.tokens + block[: accepted + 1]
            tokens += picked[: accepted + 1]
        assert tokens[: len(want)] == want


def test_numbers_of_a_request_do_not_depend_on_the_others_in_the_batch(hybrid: tuple[Any, Path]) -> None:
    _, folder = hybrid
    rig = HybridRig(folder)
    seqs = {rid: tokens_of(50 + rid, 60) for rid in range(8)}
    lens = {0: 17, 1: 22, 2: 9, 3: 30, 4: 18, 5: 19, 6: 41, 7: 3}

    def states(rids: list[int], base: int) -> dict[int, torch.Tensor]:
        reqs = {rid: rig.open(base + rid, 60) for rid in rids}
        for num in (lens, dict.fromkeys(rids, 5)):
            segments = [
                rig.segment(req, seqs[rid][len(req.tokens) :][: num[rid]], certain=num[rid])
                for rid, req in reqs.items()
            ]
            rig.forward(segments, {i: (req, num[rid]) for i, (rid, req) in enumerate(reqs.items())})
        table = rig.linear.table.state_in
        return {rid: rig.linear.states.read(torch.from_numpy(table[req.row]).long()) for rid, req in reqs.items()}

    together = states(list(lens), 100)
    for rid in lens:
        assert torch.equal(states([rid], 200 + rid)[rid], together[rid]), f"{rid=}"


def test_features_are_the_residual_after_linear_and_full_layers(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder, taps=[3, 0])
    tokens = tokens_of(1, 20)
    rig.chunk(rig.open(1, 20), tokens)
    with torch.no_grad():  # the last entry of hidden_states is normed
        layers = oracle.model.layers
        seen = []
        hooks = [layers[i].register_forward_hook(lambda _m, _i, out: seen.append(out)) for i in (0, 3)]
        oracle(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
    want = torch.cat((seen[1][0], seen[0][0]), dim=-1)
    assert (rig.features[:20] - want).abs().max() < 1e-4


def test_bfloat16_stays_close_to_float32(hybrid: tuple[Any, Path]) -> None:
    oracle, folder = hybrid
    rig = HybridRig(folder, dtype="bfloat16")
    assert rig.linear.rings.shape.dtype == torch.bfloat16
    tokens = tokens_of(6, 60)
    req = rig.open(1, 60)
    got = torch.cat([rig.chunk(req, tokens[i : i + 17]) for i in range(0, 60, 17)])
    want = oracle_logits(oracle, tokens)
    assert (got - want).pow(2).mean().sqrt() < 0.05 * want.std()


def test_a_forward_refuses_what_state_and_ring_cannot_do(hybrid: tuple[Any, Path]) -> None:
    rig = HybridRig(hybrid[1])
    req = rig.open(1, 60)
    rig.chunk(req, tokens_of(1, 10))
    row = req.row
    with pytest.raises(ValueError, match="need a ring of 16 rows; it has 14"):
        rig.runner.forward([Segment(row, 10, tokens_of(2, 14), 0, 8, 1)])
    with pytest.raises(ValueError, match="state at 6 before token 10, pages of 4"):
        rig.runner.forward([Segment(row, 10, [5], 0, 6, 1)])
    with pytest.raises(ValueError, match="state at 12 before token 10"):
        rig.runner.forward([Segment(row, 10, [5], 0, 12, 1)])
    with pytest.raises(ValueError, match="2 rows of 1 are certain"):
        rig.runner.forward([Segment(row, 10, [5], 0, 8, 2)])
    with pytest.raises(ValueError, match="one segment a request"):
        rig.runner.forward([Segment(row, 10, [5], 0, 8, 1), Segment(row, 11, [5], 0, 8, 1)])
    with pytest.raises(ValueError, match="takes no tokens"):
        rig.runner.catch_up([Segment(row, 10, [5], 0, 8, 1)])
