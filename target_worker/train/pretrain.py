"""`python -m target_worker.train.pretrain`: train the embedded hybrid model on shards of tokens, in slices.

The same command again goes on from --state until all steps are made.
"""

import argparse
import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from memsvc.device.shards import FILE_BYTES, write_shards
from target_worker.train.config import NetworkConfig, PretrainConfig
from target_worker.train.flags import parse
from target_worker.train.fused import Fused
from target_worker.train.network import first_params, hidden_states
from target_worker.train.shards import HELD_OUT, TRAIN, read_tokens
from target_worker.train.sliced_run import SlicedRun
from target_worker.train.start import begin
from target_worker.train.stream import Stream, held_out_sequences
from target_worker.train.tokenizer import END_OF_TEXT

logger = logging.getLogger(__name__)

LOG_FILE = "pretrain.jsonl"
_LOSS_ROWS = 16384
"""Rows whose logits are held at a time."""
_EVAL_BATCH = 16


class Pretraining(SlicedRun):
    """The model in training."""

    log_file = LOG_FILE

    def __init__(self, network: NetworkConfig, config: PretrainConfig, corpus: Path, state: Path, device: str) -> None:
        """Raises ValueError if corpus, network and saved state do not fit each other."""
        self._network = network
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._num_sequences = config.sequences_per_step
        self._stream = Stream(read_tokens(corpus, TRAIN), network.positions, config.seed)
        self._held_out = held_out_sequences(read_tokens(corpus, HELD_OUT), network.positions, config.eval_sequences)
        top = max(int(self._stream.tokens.max()), int(self._held_out.max()))
        if top >= network.vocab:
            raise ValueError(f"{corpus} holds token {top}, --vocab is {network.vocab}")
        identity = {"network": asdict(network), "tokens": len(self._stream.tokens)}
        super().__init__(config, state, first_params(network, config.seed, device), identity, {})

    def _loss(self) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        num = self._num_sequences
        loss = self._entropy(self._stream.sequences(self.progress.step * num, num))
        return loss, num * self._network.positions, {}

    def _entropy(self, sequences: np.ndarray) -> torch.Tensor:
        """Mean cross-entropy of the tokens after each position."""
        host = torch.from_numpy(sequences)
        tokens = (host.pin_memory() if self._device.type == "cuda" else host).to(self._device, non_blocking=True)
        cast = {name: part.to(self._dtype) if part.dim() > 1 else part for name, part in self.params.items()}
        x = hidden_states(self._network, cast, tokens[:, :-1]).flatten(0, 1)
        wanted = tokens[:, 1:].flatten()
        head = cast["model.embed_tokens.weight"]
        parts = [
            _summed_entropy(rows, head, targets)
            for rows, targets in zip(x.split(_LOSS_ROWS), wanted.split(_LOSS_ROWS), strict=True)
        ]
        return torch.stack(parts).sum() / len(wanted)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean cross-entropy of held-out tokens, in nats."""
        pieces = np.array_split(self._held_out, max(1, len(self._held_out) // _EVAL_BATCH))
        total = sum(float(self._entropy(piece)) * len(piece) for piece in pieces)
        return total / len(self._held_out)

    def _held_out_facts(self) -> dict[str, float]:
        loss = self.held_out_loss()
        return {"held_out_loss": round(loss, 4), "perplexity": round(math.exp(loss), 3)}

    def export(self, tokenizer: Path, out: Path) -> None:
        """A Hugging Face folder of the model as it stands, bfloat16, with the tokenizer's files."""
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(tokenizer.iterdir()):
            if file.is_file() and file.resolve() != (out / file.name).resolve():
                shutil.copyfile(file, out / file.name)
        eos_id = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(END_OF_TEXT)
        if eos_id is None:
            raise ValueError(f"the tokenizer in {tokenizer} has no {END_OF_TEXT}")
        whole = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in self.params.items()}
        write_shards(out, whole, FILE_BYTES)
        (out / "config.json").write_text(
            json.dumps(self._network.to_json(eos_id, "bfloat16"), indent=1) + "\n", "utf-8"
        )


def summed_entropy(x: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of rows [m, hidden] with tokens [m]."""
    return F.cross_entropy(F.linear(x, head).float(), wanted, reduction="sum")


_summed_entropy = Fused(summed_entropy, moving=0)


def main(argv: Sequence[str] | None = None) -> None:
    """One slice."""
    parser = argparse.ArgumentParser(prog="python -m target_worker.train.pretrain", description=__doc__)
    parser.add_argument("--corpus", required=True, type=Path, help="folder of shards made by train.tokenizer")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of the tokenizer's files")
    parser.add_argument("--state", required=True, type=Path, help="folder of state and log; goes on if there is one")
    parser.add_argument("--out", required=True, type=Path, help="folder of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, network, config = parse(parser, argv, NetworkConfig, PretrainConfig)
    begin(args.device)
    if args.device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
    training = Pretraining(network, config, args.corpus, args.state, args.device)
    if training.is_done:
        logger.info("all steps are made: steps=%d", training.progress.step)
    else:
        training.run()
    training.export(args.tokenizer, args.out)


if __name__ == "__main__":
    main()
