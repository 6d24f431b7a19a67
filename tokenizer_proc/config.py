"""What the tokenizer process is told at start."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Made once by launch, written as JSON into the run directory."""

    run_dir: str
    """Directory of the sockets, mode 0700."""
    model_path: str
    """Hugging Face folder: tokenizer.json, tokenizer_config.json, config.json, maybe chat_template.jinja."""
    context_len: int
    """Longest prompt plus answer in tokens."""
    max_stops: int = 64
    """Stop strings of one request."""
    max_stop_chars: int = 4096
    """Characters of all stop strings of one request together."""
    inline_chars: int = 2048
    """Prompts up to this length are encoded in the loop, in about a millisecond; longer ones in a thread."""
    encode_threads: int = 2
    """Threads for long prompts."""
    abort_timeout_s: float = 30.0
    """An aborted request that the target does not end by then is ended here."""
    log_level: str = "INFO"
    """Level of the process log."""
