"""Without a GPU: products of few rows compile for Hopper, with the loads and matrix units that were meant."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.support.compile_skinny"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr[-3000:]
    return [json.loads(line) for line in told.stdout.splitlines()]


@pytest.fixture(scope="module")
def products(usages):
    return [usage for usage in usages if usage["kernel"] in ("_tiled", "_streamed")]


def test_nothing_spills_and_everything_fits(usages):
    assert [usage for usage in usages if usage["stack_bytes"] or usage["shared_bytes"] > 227 << 10] == []


def test_weights_come_in_16_bytes_a_thread_or_by_the_copy_engine_several_tiles_ahead(products):
    for usage in products:
        assert usage["copy_bytes"] == 16, usage
        assert (usage["tensor_copies"] > 0) == ("tma" in usage["case"] or "wide" in usage["case"]), usage
        # One tile of 64 x 128 and its rows are 20 KB: with fewer than two, nothing is on its way.
        assert usage["shared_bytes"] > 40 << 10, usage


def test_tiles_of_64_rows_go_to_the_matrix_units_out_of_shared_memory(products):
    through_registers = {usage["case"] for usage in products if usage["matrix_unit"] != "wgmma"}
    assert through_registers == {"qkv 9 through registers"}


def test_only_weights_are_asked_for_before_the_kernel_ahead_has_ended(products):
    assert len(products) == 13
    assert [usage for usage in products if not usage["prefetched_before_waiting"]] == []
    assert [usage for usage in products if not usage["loaded_after_waiting"]] == []


def test_results_and_sums_are_written_16_bytes_a_thread(usages):
    # A tile of 32 x 16 is four values a thread.
    assert {usage["case"] for usage in usages if usage["write_bytes"] < 16} == {"qkv 9 through registers"}
