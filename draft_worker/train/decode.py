"""Batched decoding over a dense cache: a fixed number of slots, one captured step, prompts put in as slots free up."""

from collections.abc import Callable

import numpy as np
import torch

from draft_worker.train.decode_attention import choose_attention
from draft_worker.train.delta import SlotStates
from draft_worker.train.target import causal_attention
from target_worker.model.decoder import Decoder

_WARMUP_STEPS = 3
_LEAST_NOISE = 1e-30
_PREFILL_TOKENS = 32768
"""Padded tokens of prompts in one forward."""


class BatchDecoder:
    """Slots that each extend one sequence by a token a step. Sampling draws from torch's default generator."""

    def __init__(self, model: Decoder, slots: int, max_len: int, max_new: int) -> None:
        """max_len: longest prompt plus answer."""
        shape, device = model.shape, model.device
        self._model = model
        self.slots = slots
        self.max_len = max_len
        form = (shape.num_full_layers, slots, max_len, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(form, dtype=model.dtype, device=device)
        self._values = torch.zeros(form, dtype=model.dtype, device=device)
        self._attention = choose_attention(shape.num_heads, shape.num_kv_heads, shape.head_dim, self._keys)
        self._states = None
        if shape.linear is not None:
            self._states = SlotStates(shape.linear, shape.num_linear_layers, slots, self._keys)
        self._rows = torch.arange(slots, device=device)
        self._eos = torch.tensor(shape.eos_ids, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """Newest token of each slot, not in the cache yet."""
        self.lens = torch.zeros(slots, dtype=torch.int64, device=device)
        """Its position."""
        self.temperatures = torch.ones(slots, dtype=torch.float32, device=device)
        """0 = greedy."""
        self.answers = torch.zeros((slots, max_new), dtype=torch.int32, device=device)
        self.num_new = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens of the answer so far."""
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)
        """The answer goes on."""
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def fill(self, slots: list[int], prompts: list[np.ndarray], temperatures: list[float]) -> None:
        """Begin answers in these slots, whatever was there before. Each prompt has a token or more."""
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
        while len(order):
            longest = np.maximum.accumulate([max(1, len(prompts[index]) - 1) for index in order])
            num = max(1, int((longest * np.arange(1, len(order) + 1) <= _PREFILL_TOKENS).sum()))
            self._prefill([slots[index] for index in order[:num]], [prompts[index] for index in order[:num]])
            order = order[num:]
        where = torch.tensor(slots, device=self.tokens.device)
        self.tokens[where] = torch.tensor([int(prompt[-1]) for prompt in prompts], device=where.device)
        self.lens[where] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=where.device)
        self.temperatures[where] = torch.tensor(temperatures, dtype=torch.float32, device=where.device)
        self.num_new[where] = 0
        self.alive[where] = True

    def _prefill(self, slots: list[int], prompts: list[np.ndarray]) -> None:
        """K, V and states of all prompt tokens but the last. What padding writes is overwritten before it is read."""
        n, device = len(prompts), self.tokens.device
        longest = max(1, *(len(prompt) - 1 for prompt in prompts))
        padded = np.zeros((n, longest), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        where = torch.tensor(slots, device=device)
        lens = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.reshape(n, longest, -1, part.shape[-1]) for part in (q, k, v))
            self._keys[layer, where, :longest] = k
            self._values[layer, where, :longest] = v
            return causal_attention(q, k, v)

        positions = torch.arange(longest, device=device).repeat(n)
        recur = None if self._states is None else self._states.begin(where, lens)
        self._model.hidden(torch.from_numpy(padded).to(device).flatten(), positions, attend, recur=recur)

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """So many steps of all slots; those that are not alive change nothing that is read."""
        if self._replay is None:
            self._replay = self._capture() if self.tokens.device.type == "cuda" else self._step
        for _ in range(steps):
            self._replay()

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph. Warm-up steps count for nothing: no slot is alive in them."""
        alive = self.alive.clone()
        self.alive.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.alive.copy_(alive)
        return graph.replay

    def _step(self) -> None:
        recur = None if self._states is None else self._states.step(self.alive)
        x = self._model.hidden(self.tokens, self.lens, self._attend, recur=recur)
        chosen = choose(self._model.logits(x), self.temperatures)
        place = self.num_new.clamp(max=self.answers.shape[1] - 1)
        held = self.answers[self._rows, place]
        self.answers.index_put_((self._rows, place), torch.where(self.alive, chosen.int(), held))
        self.num_new += self.alive
        self.lens += self.alive
        self.tokens.copy_(torch.where(self.alive, chosen, self.tokens))
        self.alive &= ~(chosen[:, None] == self._eos).any(1)
        self.alive &= (self.num_new < self.answers.shape[1]) & (self.lens < self.max_len - 1)

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._keys[layer].index_put_((self._rows, self.lens), k)
        self._values[layer].index_put_((self._rows, self.lens), v)
        return self._attention(q, self._keys[layer], self._values[layer], self.lens).flatten(1)


def choose(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token per row int64 [n] of logits [n, vocab]: argmax at temperature 0, else a race of exponentials."""
    greedy = temperatures == 0
    scores = logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]
    # A draw of exactly 0 would be infinite after the logarithm, and not a number times 0.
    noise = torch.empty_like(scores).exponential_().clamp_min_(_LEAST_NOISE).log_()
    return scores.sub_(noise.mul_((~greedy).float()[:, None])).argmax(-1)
