"""Against target_worker.recurrence: outputs and states within the rig's tolerance, everything else bit for bit.
Whatever may not be read holds NaN."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.delta_memory import DeltaMemory, DeltaTables, move_states
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from memsvc.device.kernels.delta_verify import delta_verify
from memsvc.device.kernels.places import BlockRows
from tests.support import delta_rig as rig
from tests.support import kernel_bounds

DTYPES = [torch.float32, torch.bfloat16]
CASES = [
    ({"group": 1}, None),
    ({"group": 3}, None),
    ({"num_k_heads": 1, "group": 2, "k_dim": 16, "v_dim": 8, "kernel": 2}, None),
    ({"num_k_heads": 1, "group": 3, "kernel": 3, "k_dim": 40, "v_dim": 40}, DeltaTile(16, 1, piece=16)),
    ({"num_k_heads": 1, "group": 2, "k_dim": 128, "v_dim": 128}, None),
]


@pytest.fixture(autouse=True)
def bounds_of_each_operand(monkeypatch):
    """Rows of one load lie in the ring and in the block."""
    kernel_bounds.allow_several_operands(monkeypatch)


def run_step(case, members, tile=None):
    """A step of all layers: checks outputs and arena, and returns how many states were written."""
    case.poison()
    before, rows, inputs = case.arena.clone(), case.rows(members), []
    for layer in range(rig.LAYERS):
        inputs.append(case.blocks(members))
        got = delta_verify(inputs[-1].raw, inputs[-1].gates, rows, case.site(layer, tile=tile))
        want = case.want(members, layer, inputs[-1])
        assert torch.allclose(got, want, **case.tolerance), (layer, (got - want).abs().amax((1, 2)))
    case.check_tables()
    move_states(rows, case.memory)
    return case.check_arena(before, members, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "tile"), CASES)
def test_steps_are_the_recurrences(device, dtype, spec, tile):
    case = rig.Rig(device, dtype, rig.spec_of(**spec), seed=len(spec))
    num_written, num_borrowed = 0, 0
    for step in range(7):
        members = [*case.dice.sample(range(1, rig.SLOTS + 1), case.dice.choice([2, 3])), 0]
        case.dice.shuffle(members)
        case.requests[4].is_done = step in (2, 5)
        table = case.reference.table
        passing = [m for m in members if case.is_live(m) and case.edge(m) > case.requests[m].state_len]
        num_borrowed += sum(table.is_borrowed(m) for m in passing)
        num_written += run_step(case, members, tile)
        case.advance(members)
        case.check_tables()
    assert 2 <= num_borrowed < num_written // rig.LAYERS


def test_a_launch_reads_nothing_that_another_program_of_it_writes(device):
    # Each program reads its part of a state before it writes it. All else has to stay as it was for the others.
    case = rig.Rig(device, torch.bfloat16, rig.spec_of(num_k_heads=1))
    num_overwritten = 0
    for _ in range(5):
        case.poison()
        members = [1, 3, 2]
        rows, inputs, states = case.rows(members), case.blocks(members), case.memory.recurrent.clone()
        outs = []
        for _ in range(2):
            case.memory.recurrent.copy_(states)
            outs.append(delta_verify(inputs.raw, inputs.gates, rows, case.site(0)))
        assert torch.equal(*outs)
        case.memory.recurrent.copy_(states)
        num_overwritten += sum(
            case.edge(m) > case.requests[m].state_len > 0 and not case.reference.table.is_borrowed(m) for m in members
        )
        run_step(case, members)
        case.advance(members)
    assert num_overwritten


@pytest.mark.parametrize("accepted", range(1, rig.BLOCK + 1))
def test_every_offset_from_a_page_edge_is_met_on_the_way(device, accepted):
    case = rig.Rig(device, torch.float32, rig.spec_of(num_k_heads=1, group=1))
    case.dice.randint = lambda _low, _high: accepted
    met = set()
    for _ in range(2 * rig.PAGE):
        met.add(case.requests[1].length - case.requests[1].state_len)
        run_step(case, [1])
        case.advance([1])
        case.check_tables()
    assert max(met) >= rig.PAGE + accepted - 2 + (accepted == 1)


def test_a_ring_may_be_full(device):
    case = rig.Rig(device, torch.float32, rig.spec_of())
    request = case.requests[3]
    room = case.shapes[1].num_rows - rig.BLOCK
    more = room - (request.length - request.state_len)
    for memory in (case.own, case.reference):
        torch.manual_seed(1)
        for layer in range(rig.LAYERS):
            case._put(memory, 3, layer, request.length, case.inputs(more))
    request.length += more
    assert run_step(case, [3]) == rig.LAYERS
    case.advance([3])
    case.check_tables()


def at_distance(monkeypatch, device, held, slot=3, dtype=torch.float32, **spec):
    """A rig with pages of 16 and blocks of 9 in which so many rows of a slot are to be replayed."""
    monkeypatch.setattr(rig, "PAGE", 16)
    monkeypatch.setattr(rig, "BLOCK", 9)
    case = rig.Rig(device, dtype, rig.spec_of(num_k_heads=1, group=2, **spec))
    request = case.requests[slot]
    request.length = request.state_len
    return lengthened(case, slot, held)


def lengthened(case, slot, num):
    """Its next rows are in the ring on both sides."""
    torch.manual_seed(1)
    rows = [case.inputs(num) for _ in range(rig.LAYERS)]
    for memory in (case.own, case.reference):
        for layer in range(rig.LAYERS):
            case._put(memory, slot, layer, case.requests[slot].length, rows[layer])
    case.requests[slot].length += num
    return case


# An edge lies 16 rows on; behind it 32 rows are a chunk, or 16 where no more are there.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [1, 3], ids=["from zero", "from a state"])
@pytest.mark.parametrize("held", [0, 7, 15, 16, 17, 20, 21, 24])
def test_chunks_of_any_fill_and_edges_anywhere_in_them(device, monkeypatch, held, slot, dtype):
    case = at_distance(monkeypatch, device, held, slot, dtype)
    assert run_step(case, [slot]) == (rig.LAYERS if held >= 16 else 0)
    case.advance([slot])
    case.check_tables()
    run_step(case, [slot])


@pytest.mark.parametrize("alike", [True, False], ids=["the same row again and again", "rows of all kinds"])
@pytest.mark.parametrize(
    ("g", "beta"), [(-100.0, 1.0), (-1e4, 0.5), (0.0, 1.0), (0.0, 0.0), (-1e-3, 1.0), (-100.0, 0.0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_forgotten_or_never_taken_in_and_rows_that_are_alike(device, monkeypatch, g, beta, alike, dtype):
    plain = rig.Rig.inputs

    def inputs(self, num):
        made = plain(self, num)
        made.gates[:, 0], made.gates[:, 1] = g, beta
        made.raw[:] = made.raw[:1].clone() if alike and num else made.raw
        return made

    monkeypatch.setattr(rig.Rig, "inputs", inputs)
    for held in (20, 24):
        case = at_distance(monkeypatch, device, held, dtype=dtype)
        run_step(case, [3])


def error_of(monkeypatch, device, dtype, change):
    """Largest error of some steps' outputs, relative to the largest output; change alters inputs."""
    plain, worst = rig.Rig.inputs, 0.0

    def inputs(self, num):
        change(made := plain(self, num))
        return made

    monkeypatch.setattr(rig.Rig, "inputs", inputs)
    case = rig.Rig(device, dtype, rig.spec_of(num_k_heads=1, group=2, k_dim=128, v_dim=16))
    for _ in range(4):
        case.poison()
        rows, made = case.rows([1, 2, 3]), case.blocks([1, 2, 3])
        got, want = delta_verify(made.raw, made.gates, rows, case.site(0)), case.want([1, 2, 3], 0, made)
        case.want([1, 2, 3], 1, other := case.blocks([1, 2, 3]))
        delta_verify(other.raw, other.gates, rows, case.site(1))
        worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
        move_states(rows, case.memory)
        case.advance([1, 2, 3])
    return worst


def test_large_keys_cost_a_model_in_float16_no_precision(device, monkeypatch):
    def change(made):
        made.raw[:, :256] *= 3000

    assert error_of(monkeypatch, device, torch.float16, change) < 2e-3


def test_gates_that_forget_all_leave_small_ones_their_precision(device, monkeypatch):
    def change(made):
        made.gates[:, 0] = -0.01
        made.gates[::3, 0] = -1e5

    assert error_of(monkeypatch, device, torch.bfloat16, change) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_that_are_kept_in_bfloat16(device, dtype):
    case = rig.Rig(device, dtype, rig.spec_of(num_k_heads=1, group=3, k_dim=128, v_dim=40), kept=torch.bfloat16)
    num_written = 0
    for _ in range(5):
        num_written += run_step(case, [1, 3, 2])
        case.advance([1, 3, 2])
    assert num_written >= 2 * rig.LAYERS


def test_blocks_of_one_row(device, monkeypatch):
    monkeypatch.setattr(rig, "BLOCK", 1)
    case = rig.Rig(device, torch.float32, rig.spec_of(num_k_heads=1))
    for _ in range(2 * rig.PAGE):
        run_step(case, [1, 3])
        case.advance([1, 3])
        case.check_tables()
    assert case.requests[1].length == 2 * rig.PAGE


def test_nobody_writes_and_nobody_reads(device):
    case = rig.Rig(device, torch.bfloat16, rig.spec_of())
    case.arena.fill_(rig.POISON)
    case.requests[2].is_done = True
    before, rows = case.arena.clone(), case.rows([0, 2, 0])
    inputs = case.blocks([0, 2, 0])
    case.tables.state_in.fill_(1 << 30)
    case.tables.ring.fill_(1 << 30)
    out = delta_verify(inputs.raw, inputs.gates, rows, case.site(0))
    assert torch.equal(out, torch.zeros_like(out))
    state_len = case.tables.state_len.clone()
    move_states(rows, case.memory)
    assert torch.equal(case.arena, before)
    assert torch.equal(case.tables.state_len, state_len)
    assert (case.tables.state_in == 1 << 30).all()


def test_a_request_does_not_see_who_else_is_in_the_batch(device):
    outs = []
    for members in ([3], [0, 1, 3, 2]):
        case = rig.Rig(device, torch.bfloat16, rig.spec_of())
        torch.manual_seed(5)
        block, others = case.blocks([3]), case.blocks(members)
        place = members.index(3)
        rows = slice(place * rig.BLOCK, (place + 1) * rig.BLOCK)
        others.raw[rows], others.gates[rows] = block.raw, block.gates
        outs.append(delta_verify(others.raw, others.gates, case.rows(members), case.site(1))[rows])
    assert torch.equal(*outs)


@pytest.mark.parametrize("far", ["state", "ring"])
def test_pages_beyond_two_to_the_31_elements_are_reached(device, far):
    spec, outs = rig.spec_of(num_k_heads=1, group=1, k_dim=8, v_dim=8), []
    state, ring = rig.shapes_of(spec, torch.bfloat16)
    ring = type(ring)(page_rows=10, num_pages=1, num_heads=1, conv_dim=spec.conv_dim, dtype=torch.bfloat16)
    for stride in (1 << 14, 3 << 30):
        # Memory is touched where pages are written only. A stride has 32 bits, its product with a page has not.
        kinds = rig.kinds_of((state, ring), num_pages=4, stride=stride)
        arena = torch.empty(3 * stride + (1 << 14), dtype=torch.uint8, device=device)
        pages = {"state": 3 if far == "state" else 1, "ring": 3 if far == "ring" else 1}
        torch.manual_seed(0)
        for page in pages.values():
            arena[page * stride :][: 1 << 14].view(torch.bfloat16).copy_(torch.randn(1 << 13))
        here = {name: torch.tensor([[0], [page]], dtype=torch.int32, device=device) for name, page in pages.items()}
        tables = DeltaTables(
            state_in=here["state"], state_out=here["state"], ring=here["ring"][..., None],
            state_len=torch.tensor([0, 4], dtype=torch.int32, device=device),
        )  # fmt: skip
        memory = DeltaMemory(arena, (kinds[0], state), (kinds[1], ring), tables, page_size=rig.PAGE)
        # Gates are read as random bits otherwise.
        memory.ring_gates[pages["ring"]] = -0.5
        memory.recurrent[pages["state"]] = torch.randn(64, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        rows = BlockRows(members=one, lengths=torch.tensor([0, 9], dtype=torch.int32, device=device), block_size=3)
        raw = torch.randn(3, spec.conv_dim).to(device, torch.bfloat16)
        site = DeltaSite(memory=memory, layer=0, conv=torch.ones(4, spec.conv_dim, device=device))
        got = delta_verify(raw, torch.full((3, 2, 1), 0.5, device=device), rows, site)
        move_states(rows, memory)
        outs.append((got, *(arena[page * stride :][: 1 << 14].clone() for page in pages.values())))
    assert outs[0][0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_blocks_and_convolutions_that_rings_cannot_hold_are_refused(device):
    case = rig.Rig(device, torch.float32, rig.spec_of())
    with pytest.raises(ValueError, match="blocks of 4 rows need rings of 11, they have 10"):
        case.memory.check_block(4)
    inputs = case.blocks([1])
    with pytest.raises(ValueError, match="do not go with 6 rows"):
        delta_verify(inputs.raw, inputs.gates, case.rows([1, 0]), case.site(0))
    with pytest.raises(ValueError, match=r"pages of 128 tokens, .* 64 at most"):
        DeltaMemory(case.arena, *zip(case.kinds, case.shapes, strict=True), case.tables, page_size=128)
    shapes = rig.shapes_of(rig.spec_of(kernel=5), torch.float32)
    kinds = rig.kinds_of(shapes)
    arena = torch.empty(rig.NUM_PAGES * kinds[0].stride_bytes, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="4 rows before a row"):
        DeltaMemory(arena, (kinds[0], shapes[0]), (kinds[1], shapes[1]), case.tables, page_size=rig.PAGE)


def test_kernels_compile_for_hopper_without_spills(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_delta"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["model"] for kernel in found} == {"27b", "tiny-hybrid"}
    verify = [kernel for kernel in found if kernel["kernel"] == "verify_states"]
    assert len(verify) == 4, found
    assert all(kernel["read_bytes"] == kernel["write_bytes"] == 16 for kernel in verify), verify
    assert not any(kernel["spilled"] for kernel in found), found
