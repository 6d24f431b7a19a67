"""What the admin commands print."""

import json

from memsvc.inspect import as_dict, as_text
from memsvc.wire.admin import CheckReport, SnapshotReport, Stats
from tests.support.wire_samples import make_sample


def test_tables_show_every_name_and_every_value():
    stats = make_sample(Stats)
    assert isinstance(stats, Stats)
    text = as_text(stats)
    for field in Stats.__struct_fields__:
        assert field in text
    for kind in stats.kinds:
        row = next(line for line in text.splitlines() if kind.name in line.split())
        assert row.split() == [str(value) for value in as_dict(kind).values()]


def test_columns_line_up():
    report = make_sample(SnapshotReport)
    assert isinstance(report, SnapshotReport)
    head, *rows = as_text(report).splitlines()[1:4]
    assert len({len(head.rstrip()), *(len(row.rstrip()) for row in rows)}) == 1


def test_json_has_the_names():
    report = make_sample(CheckReport)
    assert isinstance(report, CheckReport)
    read = json.loads(json.dumps(as_dict(report)))
    assert set(read) == {"problems", "num_pages_checked", "leaked_bytes"}
    assert read["problems"][0]["owner"] == report.problems[0].owner


def test_an_empty_report_is_still_a_table():
    assert as_text(CheckReport([], 5, 0)).split() == [
        "value",
        "problems",
        "-",
        "num_pages_checked",
        "5",
        "leaked_bytes",
        "0",
    ]
