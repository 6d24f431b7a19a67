"""What bench.propose measures: turns of real workers, here of a tiny drafter and interpreted."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.config import ROUTES
from tests.bench.propose import COLUMNS, plot
from tests.bench.propose_geometry import GEOMETRIES
from tests.bench.propose_turns import Bench, Job, run_job
from tests.support.plan_rig import HostSessions

JOB = Job(
    name="tiny-dflash2", geometry=GEOMETRIES["tiny-dflash2"], rows=3, context=20, concurrency=(1, 2), dtype="float32",
    repeats=2,
)  # fmt: skip


def test_all_routes_draft_the_same_tokens_for_every_request(tmp_path, device):
    with torch.inference_mode():
        bench = Bench(replace(JOB, device=device), tmp_path)
        if device == "cpu":
            bench.session_maker = HostSessions
        drafts = [bench.worker(route).tokens(2) for route in ROUTES]
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafts[0][0] != drafts[0][1], "requests differ"
    assert all(0 < token < 512 for row in drafts[0] for token in row)


def test_the_plot_has_a_picture_for_each_block_size(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        dict.fromkeys(COLUMNS, 1.0) | {"geometry": "g", "route": route, "rows_per_request": size, "concurrency": num}
        for size in (8, 9) for route in ROUTES for num in (1, 4)
    ]  # fmt: skip
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.gpu
def test_rows_have_all_columns_and_tokens_are_equal_in_float32():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows = run_job(JOB, ROUTES)
    assert len(rows) == 6
    assert all(set(COLUMNS) <= set(row) for row in rows)
    for row in rows:
        assert row["tokens_equal"] == 1.0, row
        assert row["device_us"] > row["fwd_us"] > 0, row
