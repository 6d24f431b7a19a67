"""The gated delta rule in float32: a chunked form for many rows and a scan for few. Pure functions of tensors.

Per head, with the state S [k_dim, v_dim] and row t:
    S <- e^g_t S;  d_t = beta_t (v_t - k_t S);  S <- S + k_t^T d_t;  o_t = q_t S
q and k have unit length (epsilon 1e-6 under the root), and q is scaled by k_dim^-1/2. A row with g = 0 and beta = 0
changes nothing, which is how shorter requests are padded.

The chunked form solves C rows at once (the UT transform of the delta rule): with G the running sum of g in the chunk,
D_ij = e^(G_i - G_j) for j <= i, and A the strictly lower part of beta_i D_ij (k_i . k_j),
    (I + A) d = beta (v - e^G k S);  o = e^G q S + (D * q k^T) d;  S at row w = e^(G_w) S + sum_j e^(G_w - G_j) k_j^T d_j.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCAN_ROWS = 2
"""Up to so many rows a request is scanned. Measured on one core, 48 heads of 128 x 128, one request: the scan takes
0.7 ms a row, a chunk of 8 rows 1.9 ms; with small heads the two meet at 2 to 4 rows."""
CHUNKS = (8, 16, 32)
"""Rows of a chunk: the smallest that holds the whole request, else the last one, repeated,"""
LONG_ROWS, LONG_CHUNK = 128, 64
"""and for more than LONG_ROWS rows this one: 512 rows take 67 or 73 ms (chunks of 32 or 64) with large heads,
7.2 or 4.0 ms with small ones; chunks of 128 are six times slower."""
GROUP_ROWS = 2048
"""Requests are computed together up to so many rows, padding included: it bounds the scratch of a layer."""


def core_of(num_rows: int) -> tuple[int, int]:
    """(chunk rows, padded rows) for a request of so many rows; chunk 0 is the scan.

    It depends on nothing but the request's own rows, so its numbers do not depend on who else is in the batch.
    """
    if num_rows <= SCAN_ROWS:
        return 0, SCAN_ROWS
    chunk = LONG_CHUNK if num_rows > LONG_ROWS else next((c for c in CHUNKS if num_rows <= c), CHUNKS[-1])
    return chunk, -(-num_rows // chunk) * chunk


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of n requests after convolution, float32; key heads serve v_heads / k_heads value heads each, in order."""

    q: torch.Tensor
    """[n, rows, k_heads, k_dim], not normed."""
    k: torch.Tensor
    """As q."""
    v: torch.Tensor
    """[n, rows, v_heads, v_dim]"""
    g: torch.Tensor
    """[n, rows, v_heads], at most 0."""
    beta: torch.Tensor
    """As g."""

    def part(self, begin: int, end: int) -> "DeltaRows":
        """Rows [begin, end)."""
        return DeltaRows(*(x[:, begin:end] for x in (self.q, self.k, self.v, self.g, self.beta)))


@dataclass(frozen=True, slots=True)
class Kept:
    """States at the rows that were asked for."""

    members: list[int]
    """Requests, by their place in the batch."""
    states: torch.Tensor
    """[len(members), v_heads, k_dim, v_dim]"""


def gated_delta_rule(rows: DeltaRows, state: torch.Tensor, keep: list[int], chunk: int) -> tuple[torch.Tensor, Kept]:
    """Outputs [n, rows, v_heads, v_dim] of all rows, and the states after keep[i] rows of request i (0: not wanted).

    state [n, v_heads, k_dim, v_dim] is where each request begins; it may be overwritten. chunk divides the
    rows; 0 scans them one by one, which leaves the states after the last row in state.
    """
    num_rows = rows.v.shape[1]
    assert len(keep) == len(state), f"{keep=} of {len(state)} requests"
    assert max(keep) <= num_rows, f"{keep=} of {num_rows} rows"
    if chunk == 0:
        return _scan(rows, state, keep)
    assert num_rows % chunk == 0, f"{num_rows} rows in chunks of {chunk}"
    out = torch.empty_like(rows.v)
    found: list[Kept] = []
    for begin in range(0, num_rows, chunk):
        solved = _solve(rows.part(begin, begin + chunk), state)
        out[:, begin : begin + chunk] = solved.out.transpose(1, 2)
        here = [i for i, end in enumerate(keep) if begin < end <= begin + chunk]
        if here:
            ends = torch.tensor([keep[i] - begin for i in here], device=state.device)
            found.append(Kept(here, solved.picked(here).state_after(ends)))
        if begin + chunk < num_rows:
            state = solved.state_after(torch.full((len(state),), chunk, device=state.device))
    return out, _gathered(found, state)


def _gathered(found: list[Kept], state: torch.Tensor) -> Kept:
    if not found:
        return Kept([], state[:0])
    return Kept([i for kept in found for i in kept.members], torch.cat([kept.states for kept in found]))


def unit_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """x [n, rows, k_heads, k_dim] at unit length, heads repeated and in front: [n, num_heads, rows, k_dim]."""
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x.transpose(1, 2).repeat_interleave(num_heads // x.shape[2], dim=1)


@dataclass(frozen=True, slots=True)
class _Solved:
    """A chunk of C rows whose corrections d are known."""

    state: torch.Tensor
    """Before the chunk, [n, v_heads, k_dim, v_dim]."""
    k: torch.Tensor
    """[n, v_heads, C, k_dim]"""
    decay: torch.Tensor
    """Running sum of g, [n, v_heads, C] float64."""
    d: torch.Tensor
    """[n, v_heads, C, v_dim]"""
    out: torch.Tensor
    """[n, v_heads, C, v_dim]"""

    def picked(self, members: list[int]) -> "_Solved":
        """Some of the requests."""
        if len(members) == len(self.state):
            return self
        return _Solved(*(x[members] for x in (self.state, self.k, self.decay, self.d, self.out)))

    def state_after(self, ends: torch.Tensor) -> torch.Tensor:
        """The states after ends[i] of the chunk's rows, 1 to C, int64 [n]."""
        last = self.decay.gather(2, (ends - 1)[:, None, None].expand(-1, self.decay.shape[1], 1))
        after = torch.arange(self.decay.shape[2], device=ends.device) >= ends[:, None, None]
        weight = (last - self.decay).float().masked_fill_(after, -torch.inf).exp_()
        update = (self.k * weight[..., None]).transpose(2, 3) @ self.d
        return update.addcmul_(self.state, last.float().exp_()[..., None])


def _solve(rows: DeltaRows, state: torch.Tensor) -> _Solved:
    v, g, beta = (x.transpose(1, 2) for x in (rows.v, rows.g, rows.beta))
    num_heads, chunk = v.shape[1], v.shape[2]
    k = unit_heads(rows.k, num_heads)
    q = unit_heads(rows.q, num_heads) * k.shape[-1] ** -0.5
    # Far below 0 the float32 sum is too coarse for differences of neighbours, which may well be near 0.
    decay = g.double().cumsum(-1)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    pairs = (decay[..., :, None] - decay[..., None, :]).float().masked_fill_(future, -torch.inf).exp_()
    kq = torch.cat((k, q), dim=2)
    scores = kq @ k.transpose(2, 3)
    from_state = kq @ state
    from_state *= decay.float().exp_().repeat(1, 1, 2)[..., None]
    system = scores[:, :, :chunk] * pairs * beta[..., None]
    right = beta[..., None] * (v - from_state[:, :, :chunk])
    # The diagonal is taken as 1 and what is above it is not read.
    d = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = from_state[:, :, chunk:] + (scores[:, :, chunk:] * pairs) @ d
    return _Solved(state, k, decay, d, out)


def _scan(rows: DeltaRows, state: torch.Tensor, keep: list[int]) -> tuple[torch.Tensor, Kept]:
    num_heads, num_rows = rows.v.shape[2], rows.v.shape[1]
    k = unit_heads(rows.k, num_heads)
    q = unit_heads(rows.q, num_heads) * k.shape[-1] ** -0.5
    kq = torch.stack((k, q), dim=3)  # [n, heads, rows, 2, k_dim]
    dot = (k * q).sum(-1, keepdim=True)
    v, beta = rows.v.transpose(1, 2), rows.beta.transpose(1, 2)[..., None]
    decay = rows.g.transpose(1, 2).exp()[..., None]
    out = torch.empty_like(rows.v)
    found: list[Kept] = []
    for t in range(num_rows):
        # One read of the state serves both: q S_new = e^g q S_old + (q . k) d
        read = kq[:, :, t] @ state * decay[:, :, t, None]
        d = beta[:, :, t] * (v[:, :, t] - read[:, :, 0])
        out[:, t] = read[:, :, 1] + dot[:, :, t] * d
        state.mul_(decay[:, :, t, None])
        state.view(-1, *state.shape[2:]).baddbmm_(k[:, :, t].reshape(-1, k.shape[-1], 1), d.reshape(-1, 1, d.shape[-1]))
        here = [i for i, end in enumerate(keep) if end == t + 1]
        if here:
            found.append(Kept(here, state[here]))
    return out, _gathered(found, state)


def grouped(lens: Sequence[int]) -> list[list[int]]:
    """Places of requests by rows, those without rows left out: together are those of one form (core_of)."""
    groups: list[list[int]] = []
    for place in sorted((place for place, num in enumerate(lens) if num), key=lambda place: lens[place]):
        form = core_of(lens[place])
        last = groups[-1] if groups else []
        if last and core_of(lens[last[0]]) == form and (len(last) + 1) * form[1] <= GROUP_ROWS:
            last.append(place)
        else:
            groups.append([place])
    return groups


def gated_delta_rule_to_end(rows: DeltaRows, state: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gated_delta_rule with the states after all rows, padding included. On a device nobody waits for it."""
    if chunk == 0:
        return _scan(rows, state, [0] * len(state))[0], state
    num_rows = rows.v.shape[1]
    out = torch.empty_like(rows.v)
    ends = torch.full((len(state),), chunk, device=state.device)
    for begin in range(0, num_rows, chunk):
        solved = _solve(rows.part(begin, begin + chunk), state)
        out[:, begin : begin + chunk] = solved.out.transpose(1, 2)
        state = solved.state_after(ends)
    return out, state
