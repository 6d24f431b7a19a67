"""Without a GPU: the kernels that choose tokens compile for Hopper, and read logits 16 bytes a thread."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.slow
def test_token_kernels_compile_for_hopper_and_read_logits_wide(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.bench.sampling", "--compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    read_bytes = {row["name"]: row["read_bytes"] for row in json.loads(done.stdout)["rows"]}
    assert {"cut", "race", "pick", "score_rows", "walk_rows", "accept_block"} < set(read_bytes)
    assert read_bytes["summarise"] == read_bytes["group_maxima"] == 16
