"""`python -m tokenizer_proc --config FILE`: serve until SIGTERM."""

import sys

from memsvc.process import Program
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.worker import open_worker

PROGRAM = Program(package="tokenizer_proc", role="tokenizer", config_type=TokenizerConfig)


if __name__ == "__main__":
    sys.exit(PROGRAM.main(open_worker))
