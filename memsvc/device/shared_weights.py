"""The target's embedding and head where the draft reads them too: in the arena, and so in memory once.

The target fills them while it loads, and says DraftHello only after that; so the draft may look into them from the
first DraftHello on, and not before.
"""

import torch

from memsvc.device.fixed_frames import SharedForm
from memsvc.wire.mem import Layout


class SharedWeights:
    """Both matrices as views of the arena. Whoever makes it without `fill` finds what the target has put there."""

    def __init__(self, arena: torch.Tensor, layout: Layout, size: tuple[int, int], dtype: torch.dtype) -> None:
        """size: (vocab, hidden). Whether the head is the embedding follows from the layout.

        Raises ValueError with the numbers if the layout holds neither one nor two matrices of that size.
        """
        forms = [
            SharedForm(vocab_size=size[0], hidden_size=size[1], item_bytes=dtype.itemsize, is_tied=is_tied)
            for is_tied in (True, False)
        ]
        form = next((form for form in forms if form.num_bytes == layout.shared_bytes), None)
        if form is None:
            raise ValueError(
                f"the layout has {layout.shared_bytes} bytes of shared weights; an embedding {list(size)} of {dtype}"
                f" needs {forms[0].num_bytes}, and {forms[1].num_bytes} with a head of its own"
            )
        self.is_tied = form.is_tied
        self.embedding = _matrix(arena, layout.shared_offset, form, dtype)
        """[vocab, hidden]"""
        self.head = (
            self.embedding if form.is_tied else _matrix(arena, layout.shared_offset + form.head_offset, form, dtype)
        )
        """[vocab, hidden], the embedding itself if tied."""

    def fill(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Put values into one of the two, and return it; every process can read it then."""
        matrix.copy_(values)
        if matrix.is_cuda:
            torch.cuda.synchronize(matrix.device)
        return matrix


def shared_weights(
    arena: torch.Tensor, layout: Layout, size: tuple[int, int], dtype: torch.dtype
) -> SharedWeights | None:
    """The shared weights of an arena that has any, as SharedWeights says; None if target and draft hold their own."""
    return SharedWeights(arena, layout, size, dtype) if layout.shared_bytes else None


def _matrix(arena: torch.Tensor, offset: int, form: SharedForm, dtype: torch.dtype) -> torch.Tensor:
    return arena[offset : offset + form.matrix_bytes].view(dtype).view(form.vocab_size, form.hidden_size)
