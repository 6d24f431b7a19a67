"""One token for each row of a verify, as memsvc.device.sampling chooses it, with every parameter on the device."""

from dataclasses import dataclass

import torch

from memsvc.device.kernels.block_summary import summarise
from memsvc.device.kernels.cuts import cut
from memsvc.device.kernels.launch import cut as cut_up
from memsvc.device.kernels.launch import launch, padded
from memsvc.device.kernels.race import race
from memsvc.device.kernels.slot_fields import SlotOperands
from memsvc.device.noise import BLOCK_SIZE
from memsvc.device.slots import SlotState


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTile:
    """Sizes to choose by measurement. All powers of two."""

    summary_blocks: int = 32
    """Blocks of 256 logits a program of the first pass: 16 to 64."""
    summary_width: int = 64
    """Columns of them it reads at a time: 32 to 256."""
    penalty_blocks: int = 2
    """Blocks it reads at a time in rows with penalties: 1 to summary_blocks."""
    summary_warps: int = 4
    cut_blocks: int = 16
    """Blocks that a filtered row is looked at in one piece: 8 to 32."""
    cut_room: int = 4096
    """Tokens in a list from which a cut is found without passes over the row: 1024 to 8192."""
    cut_warps: int = 16
    race_warps: int = 4
    split_programs: int = 1056
    """Rows are shared among programs while there are no more programs than this in all,"""
    max_splits: int = 8
    """and among no more than this."""

    def splits(self, num_rows: int) -> int:
        """Programs that share a row."""
        splits = 1
        while 2 * splits <= self.max_splits and 2 * splits * num_rows <= self.split_programs:
            splits *= 2
        return splits


TILE = SampleTile()


class SampleScratch:
    """Device memory for sample_rows_device of up to max_rows rows; one stream uses it at a time."""

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        device: torch.device | str,
        *,
        tile: SampleTile = TILE,
        has_filters: bool = True,
    ) -> None:
        """has_filters: rows with top_k, top_p or min_p may come. Without, their launch and their room are spared."""
        self.max_rows = max_rows
        self.vocab = vocab
        self.tile = tile
        self.has_filters = has_filters
        num_blocks = cut_up(vocab, BLOCK_SIZE)

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.maxima, self.smallest, self.owned = (room(max_rows, num_blocks) for _ in range(3))
        self.least, self.weight = room(max_rows), room(max_rows)
        self.last = room(max_rows, dtype=torch.int32)
        self.listed = room(max_rows if has_filters else 0, tile.cut_room, dtype=torch.int32)
        self.times = room(max_rows, tile.max_splits, dtype=torch.float64)
        self.winners = room(max_rows, tile.max_splits, dtype=torch.int32)
        self.arrived = room(max_rows, dtype=torch.int32)

    def check(self, num_rows: int, vocab: int, num_places: int) -> None:
        """Raises ValueError unless logits [num_rows, vocab] of so many members fit."""
        if num_places == 0 or num_rows % num_places or num_rows > self.max_rows or vocab != self.vocab:
            raise ValueError(
                f"logits {[num_rows, vocab]} for {num_places} members, "
                f"scratch is for {self.max_rows} rows of {self.vocab}"
            )

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        tensors = (self.maxima, self.smallest, self.owned, self.least, self.weight, self.last, self.listed)
        return sum(t.numel() * t.itemsize for t in (*tensors, self.times, self.winners, self.arrived))


def sample_rows_device(
    logits: torch.Tensor,
    members: torch.Tensor,
    slots: SlotState,
    scratch: SampleScratch,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens int32 [N, R] for logits [N * R, vocab] of R rows for each member; sampling.sample_rows row by row.

    Row j is sampled at position num_tokens + j, with the counts after drafts 1 to j of its slot: it counts only if
    these are accepted, so no row waits for another. Slots that are done get 0. logits: float32, bfloat16 or
    float16, any strides; out: int32 [N, R], contiguous.
    """
    num_rows, vocab = logits.shape
    num_places = len(members)
    scratch.check(num_rows, vocab, num_places)
    if out is None:
        out = torch.empty((num_places, num_rows // num_places), dtype=torch.int32, device=logits.device)
    operands, tile = SlotOperands.of(slots), scratch.tile
    num_blocks, splits = cut_up(vocab, BLOCK_SIZE), tile.splits(num_rows)
    row = (logits, logits.stride(0), logits.stride(1), vocab, members, operands.words, operands.counts)
    sizes = {"rows_each": num_rows // num_places, **operands.sizes}
    summaries = (scratch.maxima, scratch.smallest, scratch.owned, num_blocks)
    launch(
        summarise, (cut_up(num_blocks, tile.summary_blocks), num_rows), tile.summary_warps, *row, *summaries, **sizes,
        NUM=tile.summary_blocks, WIDTH=tile.summary_width, STEP=tile.penalty_blocks,
    )  # fmt: skip
    cuts = (scratch.least, scratch.weight, scratch.last)
    if scratch.has_filters:
        launch(
            cut, (num_rows,), tile.cut_warps, *row, scratch.maxima, num_blocks, *cuts, scratch.listed, **sizes,
            BLOCKS=padded(num_blocks), TILE=tile.cut_blocks, ROOM=tile.cut_room,
        )  # fmt: skip
    launch(
        race, (splits, num_rows), tile.race_warps, *row, *summaries, *cuts, scratch.times, scratch.winners,
        scratch.arrived, out, **sizes, BLOCKS=padded(num_blocks), SHARE=padded(cut_up(num_blocks, splits)),
        SPLITS=splits,
    )  # fmt: skip
    return out
