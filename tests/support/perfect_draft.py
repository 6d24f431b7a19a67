"""Started by launch like the draft worker, answers like the fake draft. $PERFECT_DRAFT is a JSON of its options."""

import argparse
import json
import os
from pathlib import Path

import msgspec

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from memsvc.process import StopFlag, install_sigterm
from tests.support.fake_draft import FakeDraftConfig, serve

OPTIONS = "PERFECT_DRAFT"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=DraftConfig)
    shape = DraftShape.from_folder(config.draft_path)
    options = json.loads(os.environ[OPTIONS])
    stop = StopFlag()
    install_sigterm(stop.set)
    serve(
        FakeDraftConfig(
            run_dir=config.run_dir,
            block_size=1 + config.drafts_per_block(shape),
            target_layer_ids=tuple(shape.target_layer_ids),
            engine=config.engine,
            announce=True,
            **options,
        ),
        stop,
    )


if __name__ == "__main__":
    main()
