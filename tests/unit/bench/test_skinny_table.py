"""What the bench of products of few rows makes of its figures, and what it tries."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.skinny_tiles import SkinnyPlan
from tests.bench import skinny
from tests.bench.skinny_cases import MODELS, PRODUCTS, ROWS, SEARCHED, Product, variants

PLAN = {"block_n": 64, "block_k": 128, "splits": 4}
FEW = [8, 9, 16]


def figures(quicker):
    """cuBLAS takes 10 us everywhere, the plan 8 at the rows named and 9.9 elsewhere."""
    return [
        {"n": p.n, "k": p.k, "ending": p.ending, "rows": m, "plan": plan, "floor_us": 5.0, "ratio": 1.0}
        | {"device_us": 10.0 if plan is None else 8.0 if m in quicker else 9.9}
        for p in PRODUCTS
        for m in FEW
        for plan in (None, PLAN)
    ]


def test_the_table_can_be_pasted_and_ends_where_cublas_wins():
    lines = skinny.table(figures(quicker=[9]), FEW)
    choices = {}
    for line in lines:
        key, entries = line.strip().rstrip(",").split(": ", 1)
        assert key.startswith("(")
        choices[key] = entries
    assert len(choices) == len(PRODUCTS)
    assert set(choices.values()) == {f"((8, None), (9, {SkinnyPlan(**PLAN)}),)"}
    assert skinny.table(figures(quicker=[]), FEW) == []


def test_a_step_is_the_sum_of_its_products_and_the_clearly_quicker_one_counts():
    found = {(step["step"], step["rows"]): step for step in skinny.steps(figures(quicker=[9]), FEW)}
    assert len(found) == len(MODELS) * len(FEW)
    num = 4 * 36 + 1
    for m, best in ((8, 10.0), (9, 8.0)):
        step = found["qwen3-8b verify", m]
        assert (step["cublas_us"], step["best_us"], step["floor_us"]) == (10.0 * num, best * num, 5.0 * num)


@pytest.mark.parametrize("m", sorted(set(SEARCHED.values())))
def test_every_product_has_variants_with_and_without_tensor_maps(m):
    assert set(SEARCHED) == set(ROWS)
    for product in PRODUCTS:
        plans = variants(product, m)
        assert {plan.tma for plan in plans} == {False, True}, product
        assert len(plans) <= 24


def test_the_weights_of_a_verify_of_qwen3_8b_are_its_15_gigabytes():
    total = sum(times * product.n * product.k * 2 for times, product in MODELS["qwen3-8b verify"].products.values())
    assert 15.1e9 < total < 15.3e9
    assert Product(24576, 4096, "gated").num_bytes(9) == 2 * (24576 * 4096 + 9 * (4096 + 12288))


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["skinny"])
    assert skinny.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
