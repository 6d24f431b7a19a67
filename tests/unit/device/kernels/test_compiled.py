"""Without a GPU: every row kernel compiles for Hopper, and reads and writes 16 bytes a thread at the models' sizes."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_row_kernels_compile_for_hopper_with_wide_accesses(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.bench.rows", "--compile", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    rows = json.loads(done.stdout)["rows"]
    assert {row["geometry"] for row in rows} == {"qwen3-8b", "qwen38-27b-dflash2"}
    narrow = [row for row in rows if min(row["read_bytes"], row["write_bytes"]) < 16]
    assert narrow == []
