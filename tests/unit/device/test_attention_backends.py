"""The choice of an attention backend: what is asked for, what is there, and what the table says."""

from dataclasses import replace

import pytest
import torch

from memsvc.device import attention_backends
from memsvc.device.attention_backends import (
    BACKENDS,
    CHOICES,
    RULES,
    TORCH,
    TRITON,
    Abilities,
    AttentionBackends,
    AttentionCase,
    Rule,
    Use,
)
from memsvc.device.flashinfer_prefill import FLASHINFER, kernel_name
from target_worker.config import ATTENTION_BACKENDS

CASE = AttentionCase(
    use=Use.EAGER, device="cuda", dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16,
    num_rows=2048, capability=9,
)  # fmt: skip
AMPERE = replace(CASE, capability=8)
FA2, FA3 = FLASHINFER["fa2"], FLASHINFER["fa3"]
OFFERED = {"torch": TORCH, "triton": TRITON, "flashinfer-fa2": FA2, "flashinfer-fa3": FA3}


def present(abilities):
    """The same, on a machine where nothing is missing."""
    return replace(abilities, missing=lambda case: None)


def backends(*names, rules=RULES):
    """What is named, or everything."""
    found = AttentionBackends(rules)
    for name in names or OFFERED:
        found.offer(name, present(OFFERED[name]), name.upper())
    return found


def test_auto_takes_the_first_of_the_rule_that_can_and_hands_out_what_was_offered():
    everything = backends()
    assert everything.choose("auto", CASE) == ("flashinfer-fa3", "FLASHINFER-FA3")
    assert everything.choose("auto", replace(CASE, head_dim=80)) == ("triton", "TRITON")
    assert everything.choose("auto", replace(CASE, dtype=torch.float64)) == ("torch", "TORCH")
    assert everything.choose("auto", replace(CASE, use=Use.GRAPH)) == ("triton", "TRITON")
    assert everything.choose("auto", replace(CASE, device="cpu")) == ("torch", "TORCH")


def test_prompts_take_fa3_on_hopper_then_triton_then_fa2():
    assert backends().choose("auto", CASE)[0] == "flashinfer-fa3"
    assert backends().choose("auto", AMPERE)[0] == "triton"
    assert backends().choose("auto", replace(CASE, capability=10))[0] == "triton"
    assert backends("torch", "triton", "flashinfer-fa2").choose("auto", CASE)[0] == "triton"
    assert backends("torch", "flashinfer-fa2", "flashinfer-fa3").choose("auto", AMPERE)[0] == "flashinfer-fa2"


def test_flashinfer_is_its_best_kernel_that_can():
    assert backends().choose("flashinfer", CASE)[0] == "flashinfer-fa3"
    assert backends().choose("flashinfer", AMPERE)[0] == "flashinfer-fa2"
    assert backends("triton", "flashinfer-fa2").choose("flashinfer", CASE)[0] == "flashinfer-fa2"
    with pytest.raises(
        ValueError, match=r"flashinfer-fa3: compute capability 8 is not among 9; flashinfer-fa2: not off"
    ):
        backends("triton", "flashinfer-fa3").choose("flashinfer", AMPERE)
    with pytest.raises(ValueError, match="'flashinfer-fa2' is not known"):
        backends().choose("flashinfer-fa2", CASE)


def test_a_narrower_rule_comes_before_the_general_one():
    few = Rule(use=Use.EAGER, device="cuda", order=("triton",), source="here", head_dims=frozenset({128}), max_rows=64)
    found = backends(rules=(few, *RULES))
    assert found.choose("auto", replace(CASE, num_rows=16))[0] == "triton"
    assert found.choose("auto", replace(CASE, num_rows=17))[0] == "flashinfer-fa3"
    assert found.choose("auto", replace(CASE, num_rows=16, head_dim=64))[0] == "flashinfer-fa3"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flashinfer", {"use": Use.GRAPH}, "use graph is not among eager"),
        ("torch", {"use": Use.GRAPH}, "use graph is not among eager"),
        ("flashinfer", {"head_dim": 96}, "head_dim 96 is not among 128, 256, 64"),
        ("flashinfer", {"sink": True}, "sinks are not supported"),
        ("triton", {"head_dim": 1024}, "head_dim 1024 is above 512"),
        ("triton", {"dtype": torch.float64}, r"dtype torch.float64 is not among"),
        ("triton", {"device": "cpu"}, "device cpu is not among cuda"),
    ],
)
def test_an_explicit_choice_that_cannot_serve_says_why(name, change, reason):
    with pytest.raises(ValueError, match=reason):
        backends().choose(name, replace(CASE, **change))


def test_pages_may_be_in_8_bits_for_backends_that_widen_them():
    eight = replace(CASE, kv_dtype=torch.float8_e4m3fn)
    assert replace(CASE, kv_dtype=torch.bfloat16).page_dtype == CASE.page_dtype == CASE.dtype
    assert backends().able(eight) == ["torch", "triton", "flashinfer-fa2"]
    assert backends().able(replace(CASE, kv_dtype=torch.float32)) == []
    assert backends().choose("auto", eight)[0] == "triton"
    assert backends().choose("auto", replace(eight, use=Use.GRAPH))[0] == "triton"
    assert backends().choose("flashinfer", eight)[0] == "flashinfer-fa2"
    assert present(FA3).refusals(eight) == ["pages of torch.float8_e4m3fn for rows of torch.bfloat16 are not supported"]
    assert kernel_name(eight, "fa2") == kernel_name(CASE, "fa2").replace("dtype_kv_bf16", "dtype_kv_e4m3")


def test_a_page_size_or_a_mask_that_a_backend_lacks_is_a_reason():
    narrow = Abilities(
        uses=frozenset(Use), devices=frozenset({"cuda"}), page_sizes=frozenset({16, 64}), not_causal=False
    )
    assert narrow.refusals(CASE) == []
    assert narrow.refusals(replace(CASE, page_size=48, causal=False)) == [
        "page size 48 is not among 16, 64",
        "rows that see later rows are not supported",
    ]


def test_unknown_unoffered_and_missing_backends_are_told_apart():
    found = backends("torch")
    with pytest.raises(ValueError, match="'fast' is not known; known are auto, torch, triton, flashinfer"):
        found.choose("fast", CASE)
    with pytest.raises(ValueError, match="triton: not offered by this worker"):
        found.choose("triton", CASE)
    found.offer("flashinfer-fa3", replace(FA3, missing=lambda case: "flashinfer is not installed"), "F")
    with pytest.raises(ValueError, match="flashinfer-fa3: flashinfer is not installed; flashinfer-fa2: not offered"):
        found.choose("flashinfer", CASE)
    assert found.choose("auto", CASE)[0] == "torch"
    assert found.able(CASE) == ["torch"]


def test_where_nobody_can_every_reason_is_named():
    with pytest.raises(ValueError, match=r"flashinfer-fa3: .*triton: .*torch: not offered"):
        backends("triton", "flashinfer-fa3").choose("auto", replace(CASE, dtype=torch.float64))
    with pytest.raises(ValueError, match="No rule is for such a case"):
        backends("torch").choose("auto", replace(CASE, device="xpu"))


def test_what_a_machine_lacks_is_found_out(monkeypatch, tmp_path):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(attention_backends.importlib.util, "find_spec", lambda name: None)
    assert TRITON.refusals(CASE) == ["triton is not installed"]
    assert FA2.refusals(CASE) == FA3.refusals(CASE) == ["flashinfer is not installed"]
    monkeypatch.setattr(attention_backends.importlib.util, "find_spec", lambda name: Spec)
    windowed = replace(CASE, window=2048)
    name = kernel_name(windowed, "fa3")
    assert "use_swa_True" in name
    assert FA3.refusals(windowed) == [f"FlashInfer's kernel {name}.so is not built"]
    (tmp_path / "data" / "aot" / name).mkdir(parents=True)
    (tmp_path / "data" / "aot" / name / f"{name}.so").touch()
    assert FA3.refusals(windowed) == []
    assert FA3.refusals(CASE) != []
    # The other kernel's file is its own.
    assert name == kernel_name(windowed, "fa2") + "_sm90"
    assert FA2.refusals(windowed) == [f"FlashInfer's kernel {kernel_name(windowed, 'fa2')}.so is not built"]
    # No file is looked for if the shape is refused anyway.
    assert FA3.refusals(replace(CASE, dtype=torch.float32)) == [
        "dtype torch.float32 is not among torch.bfloat16, torch.float16"
    ]


def test_every_rule_has_a_source_and_knows_its_names():
    assert all(rule.source and set(rule.order) <= set(BACKENDS) for rule in RULES)


def test_the_flag_takes_what_the_choice_knows():
    assert ATTENTION_BACKENDS == CHOICES
