"""The gated delta net of a hybrid target over dense tensors: whole sequences, and a state for each slot of a decoder."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from memsvc.device.gated_delta import CHUNKS, LONG_CHUNK, DeltaRows, Kept, gated_delta_rule
from target_worker.model.delta_layer import DeltaInputs, Recur
from target_worker.model.linear_spec import LinearSpec
from target_worker.recurrence import convolved


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """The recurrences of n sequences of equally many rows T, each from the zero state. Nothing waits for a GPU."""

    spec: LinearSpec
    n: int

    def recur(self, _layer: int, conv: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
        """See target_worker.model.delta_layer.Recur; rows [n * T]."""
        raw, gates = self._padded(inputs)
        out, _ = self._run(conv, raw, gates, [0] * self.n)
        return self._rows(out, inputs)

    def recur_to(
        self, lens: torch.Tensor, conv: torch.Tensor, inputs: DeltaInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs as recur's, and what the first lens[i] rows leave behind: states and windows. lens int64 [n], from 0.

        States are float32 [n, v_heads, k_dim, v_dim]; windows [n, kernel - 1, conv_dim] the last raw rows, zeros
        before the first. Outputs past lens[i] mean nothing.
        """
        raw, gates = self._padded(inputs)
        num_rows = gates.shape[1]
        # Rows without gates leave a state as it is, so each one's is that after the last of all rows.
        seen = torch.arange(num_rows, device=lens.device) < lens[:, None]
        out, kept = self._run(conv, raw, gates * seen[:, :, None, None], [num_rows] * self.n)
        at = lens[:, None] + torch.arange(self.spec.conv_kernel - 1, device=lens.device)
        windows = raw.gather(1, at[:, :, None].expand(-1, -1, raw.shape[2]))
        return self._rows(out, inputs), kept.states, windows

    def _padded(self, inputs: DeltaInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw rows [n, kernel - 1 + rows, conv_dim], zeros in front, and gates [n, rows, 2, v_heads]; whole chunks."""
        num_rows = len(inputs.raw) // self.n
        padding = -num_rows % chunk_of(num_rows)
        raw, gates = (part.unflatten(0, (self.n, num_rows)) for part in (inputs.raw, inputs.gates))
        return F.pad(raw, (0, 0, self.spec.conv_kernel - 1, padding)), F.pad(gates, (0, 0, 0, 0, 0, padding))

    def _run(
        self, conv: torch.Tensor, raw: torch.Tensor, gates: torch.Tensor, keep: list[int]
    ) -> tuple[torch.Tensor, Kept]:
        spec = self.spec
        zero = conv.new_zeros((self.n, spec.num_v_heads, spec.k_dim, spec.v_dim))
        rows = delta_rows(spec, convolved(raw, conv), gates)
        return gated_delta_rule(rows, zero, keep, chunk_of(gates.shape[1]))

    def _rows(self, out: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
        """[n * T, v_heads, v_dim], without padding."""
        return out[:, : len(inputs.raw) // self.n].flatten(0, 1)


class SlotStates:
    """State and convolution window of every slot in every linear layer."""

    def __init__(self, spec: LinearSpec, num_layers: int, slots: int, like: torch.Tensor) -> None:
        """like: of the dtype and device of activations."""
        self._spec = spec
        form = (num_layers, slots, spec.num_v_heads, spec.k_dim, spec.v_dim)
        self.states = torch.zeros(form, device=like.device)
        """float32 [layers, slots, v_heads, k_dim, v_dim]"""
        self.windows = like.new_zeros((num_layers, slots, spec.conv_kernel - 1, spec.conv_dim))
        """[layers, slots, kernel - 1, conv_dim]: the last rows before the convolution."""

    def begin(self, slots: torch.Tensor, lens: torch.Tensor) -> Recur:
        """For a forward over n sequences from their first tokens on, after which slots[i] has seen lens[i] of them.

        Nothing is left of what the slots held before.
        """
        whole = WholeSequences(self._spec, len(slots))

        def recur(layer: int, conv: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
            out, self.states[layer, slots], self.windows[layer, slots] = whole.recur_to(lens, conv, inputs)
            return out

        return recur

    def step(self, moves: torch.Tensor) -> Recur:
        """For a forward of one row a slot; slots that do not move (bool [slots]) keep what they have."""

        def recur(layer: int, conv: torch.Tensor, inputs: DeltaInputs) -> torch.Tensor:
            window = self.windows[layer]
            raw = torch.cat((window, inputs.raw[:, None]), dim=1)
            window.copy_(torch.where(moves[:, None, None], raw[:, 1:], window))
            # A row without gates changes no bit of the state.
            gates = (inputs.gates * moves[:, None, None])[:, None]
            rows = delta_rows(self._spec, convolved(raw, conv), gates)
            # The scan moves the state in place.
            out, _ = gated_delta_rule(rows, self.states[layer], [0] * len(moves), 0)
            return out[:, 0]

        return recur


def delta_rows(spec: LinearSpec, mixed: torch.Tensor, gates: torch.Tensor) -> DeltaRows:
    """Rows for the rule, of convolved ones [n, rows, conv_dim] and gates [n, rows, 2, v_heads], both float32."""
    key_size = spec.num_k_heads * spec.k_dim
    q, k, v = mixed.split([key_size, key_size, spec.value_size], dim=-1)
    heads, values = (spec.num_k_heads, spec.k_dim), (spec.num_v_heads, spec.v_dim)
    q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, values)
    return DeltaRows(q, k, v, gates[:, :, 0], gates[:, :, 1])


def chunk_of(num_rows: int) -> int:
    """Rows of a chunk: the smallest that holds the whole sequence, else the longest, so that the loop is short."""
    return next((chunk for chunk in CHUNKS if num_rows <= chunk), LONG_CHUNK)
