"""Flags of the load generator, as one frozen object."""

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """What to send, how much of it at a time, and where the results go."""

    url: str
    """Base address of the server, with or without a trailing /v1."""
    concurrency: int = 32
    """Requests in flight at a time."""
    requests: int = 128
    """Requests in all."""
    model: str = ""
    """Model name to ask for; empty takes the first of /v1/models."""
    chat: bool = True
    """True: /v1/chat/completions; False: /v1/completions."""
    prompts: Path | None = None
    """Prompt file; None makes prompts up."""
    prompt_tokens: int = 128
    """Length of a made-up prompt in words, each of them about one token, or in token ids."""
    token_ids: int = 0
    """Made-up prompts are token ids below this instead of words. 0 = words."""
    shared_prefix: int = 0
    """Words (or token ids) at the beginning of every prompt that are the same in all of them."""
    max_tokens: int = 64
    """Longest answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Prompts, hang-ups and sampling are functions of this; request i samples with seed + i."""
    ignore_eos: bool = False
    """Always generate max_tokens tokens."""
    disconnect: float = 0.0
    """Fraction of clients that hang up at a random point; half of these do not stream."""
    hang_up_s: float = 1.0
    """Longest wait before a hang-up, until finished requests show how long one takes."""
    api_key: str = ""
    """Sent as a bearer token on every route."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    settle: float = 10.0
    """Seconds given to the server at the end to become idle before its pages are counted."""
    json: Path | None = None
    """Where the report goes as JSON."""
    save_texts: Path | None = None
    """Where prompts and answers go, one JSON object a line."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.disconnect <= 1.0:
            raise ValueError(f"--disconnect must lie in [0, 1], got {self.disconnect}")
        if self.shared_prefix < 0:
            raise ValueError(f"--shared-prefix must not be negative, got {self.shared_prefix}")
        if self.token_ids < 0:
            raise ValueError(f"--token-ids must not be negative, got {self.token_ids}")
        if self.token_ids and (self.chat or self.prompts is not None):
            raise ValueError("--token-ids makes prompts up, for --completions: a chat or a prompt file has words")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url must start with http:// or https://, got {self.url!r}")

    @property
    def base_url(self) -> str:
        """The server without /v1 and without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def path(self) -> str:
        """The route that the load goes to."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


_DEFAULTS = {field.name: field.default for field in fields(LoadOptions)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description="Load an OpenAI-compatible server.")
    add = parser.add_argument
    add("--url", required=True, help="server to load, for example http://127.0.0.1:30000")
    add("--concurrency", type=int, help="requests in flight at a time (%(default)s)")
    add("--requests", type=int, help="requests in all (%(default)s)")
    add("--model", help="model name; left out, the first of /v1/models")
    route = parser.add_mutually_exclusive_group()
    route.add_argument("--chat", dest="chat", action="store_true", help="use /v1/chat/completions (the default)")
    route.add_argument("--completions", dest="chat", action="store_false", help="use /v1/completions")
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line, or JSONL with prompt, question or turns")
    add("--prompt-tokens", type=int, metavar="N", help="words of a made-up prompt (%(default)s)")
    add("--token-ids", type=int, metavar="N", help="made-up prompts are random token ids below N, with --completions")
    add("--shared-prefix", type=int, metavar="N", help="all prompts begin with the same N words (%(default)s)")
    add("--max-tokens", type=int, metavar="N", help="longest answer (%(default)s)")
    add("--temperature", type=float, help="0 is greedy (%(default)s)")
    add("--seed", type=int, help="of prompts, hang-ups and sampling (%(default)s)")
    add("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    add("--disconnect", type=float, metavar="P", help="fraction of clients that hang up (%(default)s)")
    add("--hang-up-s", type=float, metavar="S", help="longest wait before the first hang-ups (%(default)s)")
    add("--api-key", help="bearer token; left out, OPENAI_API_KEY from the environment")
    add("--timeout", type=float, metavar="S", help="a request fails after this time (%(default)s)")
    add("--settle", type=float, metavar="S", help="wait for an idle server at the end (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the report here")
    add("--save-texts", type=Path, metavar="FILE", help="write prompts and answers here (JSONL)")
    parser.set_defaults(**{name: value for name, value in _DEFAULTS.items() if name != "url"})
    parser.set_defaults(api_key=os.environ.get("OPENAI_API_KEY", ""))
    return parser


def parse_options(argv: list[str] | None = None) -> LoadOptions:
    """Options from the command line; a mistake ends the program with a message that names the flag."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return LoadOptions(**vars(args))
    except ValueError as error:
        parser.error(str(error))
