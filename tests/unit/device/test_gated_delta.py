"""Both forms of the gated delta rule against the recurrence row by row in float64."""

import pytest
import torch

from memsvc.device.gated_delta import DeltaRows, core_of, gated_delta_rule

FORMS = [0, 8, 16, 32, 64]


def rows_of(n: int, num_rows: int, seed: int = 0, k_heads: int = 2) -> tuple[DeltaRows, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def normal(*form: int) -> torch.Tensor:
        return torch.randn(form, generator=gen)

    keys, heads = (n, num_rows, k_heads, 16), (n, num_rows, 4)
    g, beta = -2 * torch.rand(heads, generator=gen), torch.rand(heads, generator=gen)
    return DeltaRows(normal(*keys), normal(*keys), normal(*heads, 8), g, beta), normal(n, 4, 16, 8)


def by_rows(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and the state after each row, float64."""
    group = rows.v.shape[2] // rows.q.shape[2]

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        return (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, dim=2)

    q, k, state = unit(rows.q) / 4, unit(rows.k), state.double()
    outs, states = [], []
    for t in range(rows.v.shape[1]):
        state = state * rows.g[:, t].double().exp()[..., None, None]
        seen = torch.einsum("nhk,nhkv->nhv", k[:, t], state)
        d = rows.beta[:, t, :, None].double() * (rows.v[:, t].double() - seen)
        state = state + k[:, t, :, :, None] * d[:, :, None]
        outs.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state))
        states.append(state)
    return torch.stack(outs, dim=1), states


@pytest.mark.parametrize("chunk", FORMS)
@pytest.mark.parametrize("k_heads", [1, 2, 4])
def test_outputs_and_states_at_any_row_equal_the_recurrence(chunk: int, k_heads: int) -> None:
    rows, state = rows_of(7, 128, k_heads=k_heads)
    keep = [0, 1, 63, 64, 65, 127, 128]
    want, states = by_rows(rows, state)
    got, kept = gated_delta_rule(rows, state.clone(), keep, chunk)
    assert (got - want).abs().max() < 2e-6
    assert sorted(kept.members) == [1, 2, 3, 4, 5, 6]
    for i, found in zip(kept.members, kept.states, strict=True):
        assert (found - states[keep[i] - 1][i]).abs().max() < 5e-6, f"after row {keep[i]}"


@pytest.mark.parametrize("chunk", FORMS)
def test_padded_rows_change_nothing(chunk: int) -> None:
    rows, state = rows_of(2, 64)
    for gate in (rows.g, rows.beta):
        gate[0, 11:] = 0
    want, states = by_rows(rows, state)
    got, kept = gated_delta_rule(rows, state.clone(), [64, 64], chunk)
    assert (got[0, :11] - want[0, :11]).abs().max() < 2e-6
    assert (kept.states[kept.members.index(0)] - states[10][0]).abs().max() < 5e-6


@pytest.mark.parametrize("chunk", FORMS)
def test_a_request_has_the_same_bits_alone_and_in_a_batch(chunk: int) -> None:
    rows, state = rows_of(5, 64)
    together, kept = gated_delta_rule(rows, state.clone(), [64, 30, 0, 64, 9], chunk)
    alone = DeltaRows(*(x[3:4] for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)))
    out, own = gated_delta_rule(alone, state[3:4].clone(), [64], chunk)
    assert torch.equal(out[0], together[3])
    assert torch.equal(own.states[0], kept.states[kept.members.index(3)])


def test_strong_forgetting_neither_overflows_nor_loses_small_numbers() -> None:
    rows, state = rows_of(2, 128)
    rows.g.mul_(40)  # e^-80 a row
    want, states = by_rows(rows, state)
    got, kept = gated_delta_rule(rows, state, [128, 5], 64)
    assert (got - want).abs().max() < 2e-6
    assert (kept.states[kept.members.index(0)] - states[127][0]).abs().max() < 2e-6


def test_no_state_is_given_out_that_nobody_wants() -> None:
    for chunk in FORMS:
        rows, state = rows_of(2, 64)
        kept = gated_delta_rule(rows, state, [0, 0], chunk)[1]
        assert kept.members == []
        assert kept.states.shape == (0, 4, 16, 8)


def test_the_form_fits_the_rows_and_depends_on_nothing_else() -> None:
    for num_rows in range(1, 400):
        chunk, padded = core_of(num_rows)
        assert num_rows <= padded < num_rows + max(chunk, 2)
        assert padded % (chunk or padded) == 0
    assert [core_of(n)[0] for n in (1, 2, 3, 8, 9, 16, 17, 128, 129)] == [0, 0, 8, 8, 16, 16, 32, 32, 64]


def test_wrong_lengths_are_our_own_mistake() -> None:
    rows, state = rows_of(2, 12)
    with pytest.raises(AssertionError, match="12 rows in chunks of 8"):
        gated_delta_rule(rows, state, [0, 0], 8)
    with pytest.raises(AssertionError, match="of 12 rows"):
        gated_delta_rule(rows, state, [13, 0], 0)
