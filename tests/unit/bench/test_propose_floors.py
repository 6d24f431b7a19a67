"""The floors that bench.propose compares with, against figures that were computed by hand."""

import pytest

from tests.bench.propose_geometry import GEOMETRIES, floor_of


@pytest.mark.parametrize(
    ("name", "num_reqs", "rows", "gigabytes", "teraflops"),
    [
        # layers 1.664e9, fc 0.131e9, context K/V 0.052e9, head 1.271e9 and selector 0.0013e9 weights of 2 bytes
        ("qwen38-27b-dflash2", 1, 9, 6.24, 0.0537),
        ("qwen38-27b-dflash2", 32, 9, 6.24, 1.717),
        ("qwen38-27b-dflash2", 32, 8, 6.24, 1.518),
        # layers 0.965e9, fc 0.084e9, context K/V 0.042e9, head 0.622e9
        ("qwen3-8b-dflash", 1, 9, 3.425, 0.0296),
    ],
)
def test_floors_are_those_of_the_weights_and_rows(name, num_reqs, rows, gigabytes, teraflops, tmp_path):
    floor = floor_of(GEOMETRIES[name].write(tmp_path, rows), num_reqs, 1300)
    assert floor.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    # 20 KiB of draft KV a token
    assert floor.kv_bytes == num_reqs * 1300 * 20 * 1024
    attention = 4 * num_reqs * rows * (1300 + rows) * 32 * 128 * 5
    assert (floor.flops - attention) / 1e12 == pytest.approx(teraflops, rel=2e-3)


def test_a_window_bounds_the_context_that_is_read(tmp_path):
    shape = GEOMETRIES["qwen38-27b-dflash2"].write(tmp_path, 8)
    assert floor_of(shape, 3, 9000).kv_bytes == floor_of(shape, 3, 2048).kv_bytes
    assert floor_of(shape, 3, 2048).us == max(floor_of(shape, 3, 2048).us, 6.24e9 / 4.3e12 * 1e6)
