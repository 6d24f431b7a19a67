"""Flags and files that make a MemConfig, and how a mistake in them is named."""

import argparse
from pathlib import Path

import msgspec
import pytest

from memsvc.config import MemConfig, make_parser, parse_bytes, parse_config, parse_kind, read_config
from memsvc.core.config import PoolConfig
from memsvc.wire.mem import KindSpec

POOL = PoolConfig(arena_bytes=1 << 20, page_size=16, kinds=[KindSpec("target_kv", 1024, 16)])
NEEDED = ["--run-dir", "d", "--arena-bytes", "1M", "--kind", "target_kv:1K:16"]


def test_flags_make_the_config():
    flags = [*NEEDED, "--kind", "draft_kv:320:16:2048", "--kind", "state:3M:0:0:48", "--exchange-bytes", "64K"]
    flags += ["--eviction-policy", "lfu", "--engine-quota", "a=b=7", "--lease-ms", "5", "--log-level", "DEBUG"]
    flags += ["--shared-bytes", "1K", "--device", "cuda:1"]
    config = parse_config(flags)
    assert config == MemConfig(
        run_dir="d",
        log_level="DEBUG",
        device="cuda:1",
        pool=PoolConfig(
            arena_bytes=1 << 20,
            page_size=16,
            kinds=[
                KindSpec("target_kv", 1024, 16),
                KindSpec("draft_kv", 320, 16, window=2048),
                KindSpec("state", 3 << 20, 0, pages_per_req=48),
            ],
            exchange_bytes=65536,
            shared_bytes=1024,
            eviction_policy="lfu",
            engine_quota_frames={"a=b": 7},
            lease_ms=5,
        ),
    )


def test_a_file_makes_the_config_and_flags_win_over_it(tmp_path: Path):
    path = tmp_path / "config.json"
    written = MemConfig(run_dir="d", pool=POOL, supervised=True)
    path.write_bytes(msgspec.json.encode(written))
    assert read_config(path) == written
    config = parse_config(["--config", str(path), "--page-size", "16", "--lease-ms", "7", "--run-dir", "e"])
    assert (config.run_dir, config.supervised, config.pool.lease_ms) == ("e", True, 7)
    assert config.pool.kinds == POOL.kinds


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"run_dir": "d"}', "pool"),
        ('{"run_dir": "d", "pool": {"arena_bytes": 1, "page_size": 16, "kinds": []}}', "no token kind"),
        ('{"run_dir": "d", "pool": POOL, "runn_dir": 1}', "MemConfig has no runn_dir"),
        ('{"run_dir": "d", "pool": {"lease": 1, POOL_FIELDS}}', "PoolConfig has no lease"),
        ('{"run_dir": "d", "pool": POOL, "log_level": "LOUD"}', "log_level is 'LOUD'"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "config.json"
    fields = '"arena_bytes": 1048576, "page_size": 16, "kinds": [["KindSpec", "target_kv", 1024, 16]]'
    path.write_text(text.replace("POOL_FIELDS", fields).replace("POOL", "{" + fields + "}"))
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_config(["--config", str(path)])
    assert str(path) in str(caught.value)


def test_what_is_missing_is_listed():
    with pytest.raises(ValueError, match="--run-dir, --arena-bytes, --kind"):
        parse_config([])
    with pytest.raises(ValueError, match=r"needed without --config: --kind$"):
        parse_config(NEEDED[:4])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("1.5G", 3 << 29), ("512M", 512 << 20), ("2GiB", 2 << 30), ("3kb", 3072), ("0", 0)],
)
def test_bytes_have_suffixes(text: str, expected: int):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "1X", "-1", "1.5", "1MM", "1e400", "nan", "0x10"])
def test_what_is_no_number_of_bytes_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "a", "a:1K", ":1K:16", "a:x:16", "a:1K:b", "a:1K:16:1:2:3"])
def test_a_malformed_kind_is_refused_with_the_form(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME:BYTES:TOKENS"):
        parse_kind(text)


def test_every_pool_setting_has_a_flag_and_the_help_shows_its_default():
    names = {action.dest for action in make_parser()._actions}
    # The endpoint follows from the run directory.
    assert set(PoolConfig.__slots__) - names == {"fd_endpoint"}
    text = " ".join(make_parser().format_help().split())
    assert f"(default {PoolConfig.__dataclass_fields__['lease_ms'].default})" in text
