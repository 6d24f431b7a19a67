"""Flags of `python -m launch`, in the spellings of SGLang and of vLLM where both have one."""

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from draft_worker.config import ROUTES
from launch.config import (
    ALGORITHMS,
    CPU_PREFILL_TOKENS,
    CUDA_PREFILL_TOKENS,
    DTYPES,
    LARGE_CUDA_PREFILL_TOKENS,
    LARGE_DEVICE_BYTES,
    LOAD_FORMATS,
    MPS_CHOICES,
    LaunchConfig,
)
from launch.http.config import API_KEY_ENV
from memsvc.config import LOG_LEVELS, parse_bytes
from memsvc.core.config import EVICTION_POLICIES
from memsvc.device.kv_dtype import KV_CACHE_DTYPES
from target_worker.config import ATTENTION_BACKENDS
from target_worker.model.linear_spec import STATE_DTYPES

_DESCRIPTION = """\
Serve a model with an OpenAI-compatible API: memory service, target, drafter, tokenizer and HTTP front,
each in its own process. Without any flag it fetches and serves SmolLM2-135M-Instruct.
"""
_EPILOG = """\
Bytes may have a suffix: 512M, 2G. On a pool that is too small the smallest that works is named.
--speculative-num-draft-tokens counts rows as SGLang does, the anchor included; --spec-tokens counts drafts.
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """names: all spellings. target: field of LaunchConfig that it sets."""

    names: str
    target: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)


FLAGS = (
    Flag("--model-path --model", "model_path", "Hugging Face folder of the model", {"metavar": "DIR"}),
    Flag("--served-model-name", "served_model_name", "name or names on the API", {"nargs": "+", "metavar": "NAME"}),
    Flag("--speculative-draft-model-path --spec-model", "draft_model_path",
         "folder of a DFlash or DFlash2 drafter; without it the model's subfolder draft, if there is one",
         {"metavar": "DIR"}),
    Flag("--speculative-algorithm --spec-method", "speculative_algorithm",
         f"one of {', '.join(ALGORITHMS)}; NONE uses no drafter",
         {"type": str.upper, "metavar": "NAME"}),
    Flag("--speculative-num-draft-tokens --speculative-dflash-block-size", "block_size",
         "rows of a block, anchor included, or auto (the default): chosen for each step by measured speed",
         {"type": lambda text: _number_or_auto(text, 0), "metavar": "B"}),
    Flag("--spec-tokens", "num_drafts", "drafts of a block, B - 1, or auto",
         {"type": lambda text: _number_or_auto(text, -1), "metavar": "K"}),
    Flag("--spec-widths", "widths", "auto: the numbers of drafts to choose from, 0 among them, as in 0,1,3,7",
         {"type": lambda text: _numbers(text), "metavar": "K,K,.."}),
    Flag("--propose-route", "propose_route", "how drafts attend to their context", {"choices": ROUTES}),
    Flag("--page-size --block-size", "page_size", "tokens in a page of KV", {"type": int, "metavar": "TOKENS"}),
    Flag("--mem-bytes --kv-cache-memory-bytes", "mem_bytes", "size of the one pool of target and draft memory",
         {"type": parse_bytes, "metavar": "BYTES"}),
    Flag("--max-running-requests --max-num-seqs", "max_running_requests", "requests that hold memory at once",
         {"type": int, "metavar": "N"}),
    Flag("--max-queued-requests --max-num-queued-reqs", "max_queued_requests", "requests that may wait beside them",
         {"type": int, "metavar": "N"}),
    Flag("--chunked-prefill-size --max-prefill-tokens --max-num-batched-tokens", "max_prefill_tokens",
         "most prompt tokens computed in one step: more serve more in all, and let those who decode wait longer"
         f" (default {CPU_PREFILL_TOKENS}, on a CUDA device {CUDA_PREFILL_TOKENS}, on one of"
         f" {LARGE_DEVICE_BYTES >> 30} GiB or more {LARGE_CUDA_PREFILL_TOKENS})", {"type": int, "metavar": "TOKENS"}),
    Flag("--context-length --max-model-len", "context_len", "longest prompt plus answer",
         {"type": int, "metavar": "TOKENS"}),
    Flag("--radix-eviction-policy", "eviction_policy", "which cached conversation goes first (docs/architecture.md)",
         {"choices": EVICTION_POLICIES}),
    Flag("--ttl-s", "ttl_s", "policy ttl: cached text unused for so long is evicted", {"type": float, "metavar": "S"}),
    Flag("--checkpoint-interval", "checkpoint_interval",
         "tokens between stored states of a long prompt, for models with recurrent layers, 0 = by their size",
         {"type": int, "metavar": "TOKENS"}),
    Flag("--dtype", "dtype", "of weights and arithmetic", {"choices": DTYPES}),
    Flag("--kv-cache-dtype", "kv_cache_dtype", "of the target's keys and values in the pool; auto is as --dtype",
         {"choices": KV_CACHE_DTYPES}),
    Flag("--speculative-draft-kv-cache-dtype", "draft_kv_cache_dtype", "of the drafter's",
         {"choices": KV_CACHE_DTYPES}),
    Flag("--mamba-ssm-dtype --mamba-ssm-cache-dtype", "mamba_ssm_dtype",
         "of recurrent states in the pool, for models with recurrent layers", {"choices": tuple(STATE_DTYPES)}),
    Flag("--quantization", "quantization", "CUDA: fp8 holds and multiplies the target's layers in 8 bits",
         {"metavar": "NAME"}),
    Flag("--load-format", "load_format", "dummy makes random weights", {"choices": LOAD_FORMATS}),
    Flag("--device", "device", "where the models run: cpu, cuda or cuda:N", {"metavar": "DEVICE"}),
    Flag("--mem-fraction-static --gpu-memory-utilization", "mem_fraction_static",
         "CUDA: share of the free memory that weights, contexts, workspaces, graphs and pool may take together",
         {"type": float, "metavar": "F"}),
    Flag("--cuda-graph-max-bs", "cuda_graph_max_bs", "CUDA: largest batch that is captured in a graph",
         {"type": int, "metavar": "N"}),
    Flag("--disable-cuda-graph --enforce-eager", "disable_cuda_graph", "CUDA: run the kernels of a step one by one",
         {"action": "store_true"}),
    Flag("--attention-backend", "attention_backend",
         "CUDA: what attends prompt chunks; blocks are attended by a kernel that runs in graphs",
         {"choices": ATTENTION_BACKENDS}),
    Flag("--mps", "mps", "CUDA: on runs the workers under an MPS daemon of this server's own (docs/architecture.md)",
         {"choices": MPS_CHOICES}),
    Flag("--threads", "threads", "torch threads of each worker, 0 = torch's choice", {"type": int, "metavar": "N"}),
    Flag("--host", "host", "address to listen on", {"metavar": "ADDR"}),
    Flag("--port", "port", "TCP port, 0 takes a free one", {"type": int}),
    Flag("--api-key", "api_key", f"key that clients must send; also --api-key-file or {API_KEY_ENV}",
         {"metavar": "KEY"}),
    Flag("--run-dir", "run_dir", "directory of the sockets, removed at the end", {"metavar": "DIR"}),
    Flag("--hang-timeout-s", "hang_timeout_s", "restart a process without a sign of life for so long, 0 = never",
         {"type": float, "metavar": "S"}),
    Flag("--spec-trace", "spec_trace", "1: a line of host times per step; 2: of device times, on a CUDA device",
         {"type": int, "metavar": "LEVEL"}),
    Flag("--simulate-accept-length", "simulate_accept_length", "load tests: force this accept length, text is noise",
         {"type": float, "metavar": "L"}),
    Flag("--log-level", "log_level", "of every process", {"type": str.upper, "choices": LOG_LEVELS}),
)  # fmt: skip
_KEY_FILE = "--api-key-file"
AUTO = "auto"


def all_flags() -> list[str]:
    """Every spelling."""
    return [*(name for flag in FLAGS for name in flag.names.split()), _KEY_FILE]


def make_parser() -> argparse.ArgumentParser:
    """All flags; those that are not given do not appear in the result."""
    parser = argparse.ArgumentParser(
        prog="python -m launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(LaunchConfig)}
    for flag in FLAGS:
        default = defaults[flag.target]
        shown = f" (default {default})" if default not in ("", 0, -1, 0.0, ()) else ""
        parser.add_argument(*flag.names.split(), dest=flag.target, help=flag.text + shown, **flag.options)
    parser.add_argument(_KEY_FILE, type=Path, help="file with the key", metavar="FILE")
    return parser


def parse_flags(argv: Sequence[str]) -> LaunchConfig:
    """The config that a command line asks for. Exits with status 2 and a message on a bad one."""
    parser = make_parser()
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown(unknown[0]))
    given: dict[str, Any] = vars(known)
    key_file: Path | None = given.pop("api_key_file", None)
    try:
        if "api_key" not in given:
            given["api_key"] = _key_from(key_file)
        if "served_model_name" in given:
            given["served_model_name"] = tuple(given["served_model_name"])
        return LaunchConfig(**given)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def shown_command(argv: Sequence[str]) -> tuple[str, ...]:
    """The command as typed, for people to read, without the key."""
    shown: list[str] = []
    for index, word in enumerate(argv):
        if word.startswith("--api-key="):
            shown.append("--api-key=***")
        elif index and argv[index - 1] == "--api-key":
            shown.append("***")
        else:
            shown.append(word)
    return ("python", "-m", "launch", *shown)


def _number_or_auto(text: str, auto: int) -> int:
    """auto: what stands for it in the config."""
    if text == AUTO:
        return auto
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None
    if number == auto:
        raise argparse.ArgumentTypeError(f"{number} is no number of tokens")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 0,1,3") from None


def _unknown(given: str) -> str:
    close = difflib.get_close_matches(given.partition("=")[0], all_flags(), n=1)
    return f"unknown argument {given}" + (f", did you mean {close[0]}?" if close else "")


def _key_from(file: Path | None) -> str:
    if file is None:
        return os.environ.get(API_KEY_ENV, "")
    try:
        key = file.read_text("utf-8").strip()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--api-key-file {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not key:
        raise ValueError(f"--api-key-file {file} is empty")
    return key
