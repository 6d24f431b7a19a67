"""Flags in every spelling, and what is said about wrong ones."""

from pathlib import Path

import pytest

from launch.config import LaunchConfig
from launch.flags import FLAGS, all_flags, make_parser, parse_flags, shown_command
from launch.http.config import API_KEY_ENV


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_flags(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_no_flag_gives_the_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(API_KEY_ENV, raising=False)
    assert parse_flags([]) == LaunchConfig()


@pytest.mark.parametrize(
    ("sglang", "vllm", "field", "value"),
    [
        ("--model-path=m", "--model=m", "model_path", "m"),
        ("--page-size=8", "--block-size=8", "page_size", 8),
        ("--mem-bytes=2G", "--kv-cache-memory-bytes=2147483648", "mem_bytes", 2 << 30),
        ("--max-running-requests=7", "--max-num-seqs=7", "max_running_requests", 7),
        ("--max-queued-requests=7", "--max-num-queued-reqs=7", "max_queued_requests", 7),
        ("--chunked-prefill-size=99", "--max-num-batched-tokens=99", "max_prefill_tokens", 99),
        ("--context-length=77", "--max-model-len=77", "context_len", 77),
    ],
)
def test_both_spellings_set_the_same(sglang: str, vllm: str, field: str, value: object):
    assert getattr(parse_flags([sglang]), field) == value
    assert parse_flags([sglang]) == parse_flags([vllm])


def test_sglang_counts_rows_and_vllm_counts_drafts():
    rows = parse_flags(["--spec-model=d", "--speculative-num-draft-tokens=8", "--speculative-algorithm=DFLASH"])
    drafts = parse_flags(["--speculative-draft-model-path=d", "--spec-tokens=7", "--spec-method=dflash"])
    assert (rows.asked_drafts, drafts.asked_drafts) == (7, 7)
    assert rows.speculative_algorithm == drafts.speculative_algorithm == "DFLASH"


@pytest.mark.parametrize(
    "argv", [[], ["--speculative-num-draft-tokens=auto"], ["--spec-tokens", "auto"], ["--spec-widths=0,1,4"]]
)
def test_the_number_of_drafts_is_chosen_step_by_step_unless_it_is_given(argv: list[str]):
    config = parse_flags(["--spec-model=d", *argv])
    assert config.is_auto
    assert config.asked_drafts == (4 if "--spec-widths=0,1,4" in argv else 0)
    assert not parse_flags(["--spec-model=d", "--spec-tokens=3"]).is_auto
    assert not parse_flags(["--spec-model=d", "--speculative-num-draft-tokens=8"]).is_auto


def test_the_settings_of_the_cache():
    config = parse_flags(["--radix-eviction-policy=ttl", "--ttl-s=1.5", "--checkpoint-interval=512"])
    assert (config.eviction_policy, config.ttl_s, config.checkpoint_interval) == ("ttl", 1.5, 512)


def test_several_served_names():
    assert parse_flags(["--served-model-name", "a", "b"]).served_model_name == ("a", "b")


def test_every_flag_sets_a_field_of_the_config_and_none_is_missing():
    targets = {flag.target for flag in FLAGS}
    assert targets == set(LaunchConfig.__dataclass_fields__)
    assert len(set(all_flags())) == len(all_flags())


def test_help_tells_the_defaults():
    text = make_parser().format_help()
    assert "--max-running-requests" in text
    assert "(default 30000)" in text


def test_an_unknown_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    assert "did you mean --page-size?" in refusal(capsys, "--page-sise", "4")
    assert "did you mean --max-num-seqs?" in refusal(capsys, "--max-num-seq=4")
    assert "did you mean" not in refusal(capsys, "--zzzzzzzz")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--page-size=0"], ["--page-size is 0", "between 1 and"]),
        (["--max-running-requests=5000"], ["5000", "4096"]),
        (["--mem-bytes=lots"], ["'lots' is not a number of bytes"]),
        (["--context-length=1"], ["--context-length is 1", "need 2"]),
        (["--port=70000"], ["70000", "65535"]),
        (["--dtype=int3"], ["int3"]),
        (["--speculative-num-draft-tokens=1", "--spec-model=d"], ["need 2"]),
        (["--speculative-num-draft-tokens=0", "--spec-model=d"], ["0 is no number of tokens"]),
        (["--spec-tokens=-1", "--spec-model=d"], ["-1 is no number of tokens"]),
        (["--spec-tokens=many", "--spec-model=d"], ["'many' is neither a number nor auto"]),
        (["--spec-widths=1,3", "--spec-model=d"], ["--spec-widths is 1,3", "needs 0"]),
        (["--spec-widths=0", "--spec-model=d"], ["--spec-widths is 0", "a number of drafts"]),
        (["--spec-widths=0,x", "--spec-model=d"], ["'0,x' is no list of numbers"]),
        (["--spec-widths=0,3", "--spec-tokens=3", "--spec-model=d"], ["--spec-widths 0,3", "is given"]),
        (["--spec-tokens=0", "--spec-model=d"], ["--spec-tokens is 0"]),
        (["--spec-tokens=7", "--speculative-num-draft-tokens=7", "--spec-model=d"], ["6 drafts", "says 7"]),
        (["--speculative-algorithm=none", "--spec-model=d"], ["--speculative-algorithm none", "name a drafter"]),
        (["--speculative-algorithm=none", "--spec-tokens=7"], ["--speculative-algorithm none", "ask for drafts"]),
        (["--speculative-algorithm=EAGLE", "--spec-model=d"], ["EAGLE", "DFLASH"]),
        (["--simulate-accept-length=3", "--spec-method=NONE"], ["--speculative-algorithm none"]),
        (["--hang-timeout-s=3"], ["--hang-timeout-s is 3", "10 s", "0 is never"]),
        (["--hang-timeout-s=-1"], ["--hang-timeout-s is -1"]),
        (["--ttl-s=0"], ["--ttl-s is 0", "between"]),
        (["--ttl-s=nan"], ["--ttl-s is nan"]),
        (["--checkpoint-interval=-1"], ["--checkpoint-interval is -1"]),
        (["--attention-backend=fast"], ["'fast'", "triton", "flashinfer"]),
        (["--kv-cache-dtype=fp4"], ["--kv-cache-dtype", "'fp4'", "auto", "fp8_e4m3"]),
        (
            ["--speculative-draft-kv-cache-dtype=fp8_e4m3", "--speculative-algorithm=none"],
            ["--speculative-algorithm none", "ask for drafts"],
        ),
        (["--mamba-ssm-dtype=float16"], ["--mamba-ssm-dtype", "'float16'", "float32", "bfloat16"]),
        (["--quantization=fp8"], ["--quantization fp8 needs a CUDA device", "--device is cpu"]),
        (["--quantization=fp8", "--device=cuda", "--dtype=float32"], ["computes in bfloat16", "--dtype is float32"]),
        (["--quantization=awq", "--device=cuda"], ["--quantization is 'awq'", "known are fp8"]),
        (["--mps=on"], ["--mps is on", "--device is cpu"]),
        (["--attention-backend", "triton"], ["--attention-backend triton", "--device is cpu"]),
        (["--mps=maybe"], ["'maybe'", "off", "on"]),
        (["--api-key=k\u00e9y"], ["printable ASCII"]),
        (["--api-key-file=/does/not/exist"], ["--api-key-file /does/not/exist", "No such file"]),
    ],
)
def test_a_wrong_value_is_refused_with_flag_limit_and_value(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
):
    message = refusal(capsys, *argv)
    for word in words:
        assert word in message


def test_the_key_comes_from_flag_file_or_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(API_KEY_ENV, "from-env")
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert parse_flags([]).api_key == "from-env"
    assert parse_flags(["--api-key-file", str(file)]).api_key == "from-file"
    assert parse_flags(["--api-key-file", str(file), "--api-key", "from-flag"]).api_key == "from-flag"


def test_the_shown_command_hides_the_key():
    assert shown_command(["--api-key", "abc", "--port", "1"])[3:] == ("--api-key", "***", "--port", "1")
    assert shown_command(["--api-key=abc"])[3:] == ("--api-key=***",)
