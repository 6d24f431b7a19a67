"""The attention kernels compile for Hopper and fit there, which needs no GPU to find out."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_the_kernels_compile_for_hopper_and_keep_what_they_hold_in_registers_and_shared_memory(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_attention"],
        capture_output=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        text=True,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    usages = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(usages) == 6
    assert [usage for usage in usages if usage["spilled_bytes"] > 0 or usage["shared_bytes"] > 227 << 10] == []
