"""Which frozen state a request goes on from, where it is told to freeze, and what outlives its client."""

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Match, Matched, Pin, Pinned
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import Close, Fenced, KindSpec, Step
from tests.support.mem_asks import committed, frozen, num_checkpoints, opened, recurrent, state_len
from tests.support.mem_builders import (
    DRAFT,
    NAMES,
    RECURRENT,
    RING,
    STATE,
    TARGET,
    Clock,
    Engine,
    check,
    make_commit,
    make_config,
    make_freeze,
    make_manager,
    stats_of,
    windowed,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
S = 2
"""Number of the kind of state."""


# --- hits ---


def test_a_hit_is_at_the_checkpoint_and_not_at_the_longer_text() -> None:
    engine = recurrent()
    pages = frozen(engine, 1, TEXT, 4)
    answer = opened(engine.open(2, [*TEXT, 9]))
    assert (answer.prefix_len, answer.state_in) == (4, [[], [], pages, []])
    assert [len(table) for table in answer.pages] == [2, 2, 2, 1]
    assert not set(answer.pages[S]) & set(pages)
    assert answer.draft_valid_from == 0
    assert stats_of(engine.manager).state_short_tokens == 4
    check(engine.manager)


def test_the_last_checkpoint_before_the_last_prompt_token_counts() -> None:
    engine = recurrent()
    frozen(engine, 1, TEXT, 4, 6, 8)
    assert opened(engine.open(2, TEXT)).prefix_len == 6
    assert opened(engine.open(3, [*TEXT, 9])).prefix_len == 8
    assert opened(engine.open(4, [1, 2, 3, 4, 5])).prefix_len == 4
    assert opened(engine.open(5, [1, 2, 3, 4, 9, 9, 9])).prefix_len == 4
    assert opened(engine.open(6, [1, 2, 9])).prefix_len == 0
    check(engine.manager)


def test_a_checkpoint_serves_its_model_and_salt_only() -> None:
    engine = recurrent()
    other = Engine(engine.manager, name="o", kinds=NAMES, fingerprint="other")
    frozen(engine, 1, TEXT, 8)
    assert opened(engine.open(2, [*TEXT, 9], salt="s")).prefix_len == 0
    assert opened(other.open(1, [*TEXT, 9])).prefix_len == 0
    same = Engine(engine.manager, name="t", kinds=NAMES)
    assert opened(same.open(1, [*TEXT, 9])).prefix_len == 8


def test_match_tells_text_and_state_apart() -> None:
    engine = recurrent()
    frozen(engine, 1, TEXT, 4)
    assert engine.manager.handle_admin(Match(tokens=pack_tokens(TEXT))) == Matched(
        prefix_len=8, draft_valid_from=0, state_len=4
    )
    assert state_len(engine.manager, [1, 2]) == 0


def test_the_second_turn_reuses_all_up_to_the_last_full_page_of_the_first_answer() -> None:
    engine = recurrent()
    committed(engine, 1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 13, tokens=[11, 12, 13, 14, 15])
    engine.close(1, freeze_at=12)
    answer = opened(engine.open(2, [*TEXT, 11, 12, 13, 14, 15, 20, 21]))
    assert (answer.prefix_len, answer.draft_valid_from) == (12, 0)


def test_retract_and_resume_is_a_hit_at_the_last_frozen_edge() -> None:
    engine = recurrent()
    committed(engine, 1, TEXT)
    engine.reserve(1, 8)
    engine.step(
        commit=make_commit(1, 11, 11, [11, 12, 13]), closes=[Close([ReqId(1)], "retract")], freeze=make_freeze(1, 10)
    )
    answer = opened(engine.open(2, [*TEXT, 11, 12, 13]))
    assert (answer.prefix_len, stats_of(engine.manager).state_short_tokens) == (10, 0)


def test_states_of_two_models_with_kinds_of_their_own_share_a_pool() -> None:
    small = KindSpec(name="small", page_bytes=768, tokens_per_page=0, pages_per_req=1, is_state=True)
    manager = make_manager(60, [TARGET, DRAFT, STATE, RING, small])
    large = Engine(manager, kinds=NAMES)
    other = Engine(manager, name="o", kinds=("target_kv", "small"), fingerprint="other")
    for engine in (large, other):
        engine.run(1, TEXT)
        engine.freeze(1, 6)
        check(manager)
        engine.close(1, freeze_at=8)
        assert opened(engine.open(2, [*TEXT, 9])).prefix_len == 8
        check(manager)
    assert [len(pages) for pages in opened(other.open(3, [*TEXT, 9])).state_in] == [0, 0, 0, 0, 1]


def test_a_hit_at_a_checkpoint_takes_the_draft_pages_of_the_window_before_it() -> None:
    manager = MemoryManager(make_config(60, [TARGET, windowed(DRAFT, 4), STATE, RING]), clock=Clock())
    engine = Engine(manager, kinds=NAMES)
    frozen(engine, 1, TEXT, 6)
    answer = opened(engine.open(2, [*TEXT, 9]))
    assert (answer.prefix_len, answer.draft_valid_from) == (6, 2)
    assert [bool(page) for page in answer.pages[1]] == [False, True, True]


# --- where to freeze ---


def at(engine: Engine, rid: int, tokens: list[int]) -> list[int]:
    return opened(engine.open(rid, tokens)).checkpoint_at


def test_checkpoints_are_worth_it_at_fork_prompt_end_and_intervals() -> None:
    engine = recurrent(90, checkpoint_interval=8)
    assert at(engine, 1, TEXT) == [6]
    assert at(engine, 2, [*TEXT, 9]) == [8]
    assert at(engine, 3, list(range(30))) == [8, 16, 24, 28]
    engine.run(4, list(range(50, 60)))
    # text that is there without a state ends at 10: the fork
    assert at(engine, 5, [*range(50, 60), *range(20)]) == [8, 10, 16, 24, 28]
    engine.freeze(4, 10)
    assert at(engine, 6, [*range(50, 60), *range(20)]) == [16, 24, 28]
    assert at(engine, 7, [1]) == []


def test_the_interval_makes_states_cost_half_of_the_text_unless_it_is_given() -> None:
    # two pages of 1536 bytes for the states, 768 for two tokens of text: 8 pages
    assert at(recurrent(90), 1, list(range(40))) == [16, 32, 38]
    assert at(recurrent(90, checkpoint_interval=5), 1, list(range(11))) == [4, 8, 10]
    assert at(recurrent(90, checkpoint_interval=1), 1, list(range(7))) == [2, 4, 6]


# --- after faults ---


def test_checkpoints_outlive_a_fenced_client_and_its_locks_do_not() -> None:
    engine = recurrent()
    pages = frozen(engine, 1, TEXT, 4)
    old = engine.epoch
    opened(engine.open(2, [*TEXT, 9]))
    engine.reserve(2, 5)
    engine.step(commit=make_commit(2, 6, 6, []), done_step=0)
    opened(engine.open(3, [*TEXT, 9]))
    engine.register()
    assert engine.manager.handle(Step(old, 1, 0)) == Fenced(old)
    check(engine.manager)
    assert engine.manager.handle_admin(Evict(kind="state", num_pages=2)) is not None
    assert num_checkpoints(engine) == 0
    engine.manager.client_exited(old)
    check(engine.manager)
    assert pages


def test_a_new_process_of_the_same_model_finds_the_checkpoints() -> None:
    engine = recurrent()
    pages = frozen(engine, 1, TEXT, 8)
    engine.manager.client_exited(engine.epoch)
    engine.register()
    assert opened(engine.open(1, [*TEXT, 9])).state_in[S] == pages


def test_a_pin_holds_the_last_checkpoint_of_its_text_until_it_ends() -> None:
    clock = Clock()
    manager = MemoryManager(make_config(60, list(RECURRENT), pin_budget_frames=8), clock=clock)
    engine = Engine(manager, kinds=NAMES)
    frozen(engine, 1, TEXT, 4, 6)
    pinned = manager.handle_admin(Pin(name="a", tokens=pack_tokens(TEXT), ttl_s=5))
    # 4 + 4 pages lie in 2 + 2 frames, the state in 2
    assert isinstance(pinned, Pinned)
    assert pinned.budget_left == 8 - 6
    manager.handle_admin(Evict(kind="state", num_pages=9))
    assert (num_checkpoints(engine), state_len(manager, TEXT)) == (1, 6)
    clock.now += 6
    manager.tick()
    manager.handle_admin(Evict(kind="state", num_pages=9))
    assert num_checkpoints(engine) == 0


def test_a_pin_past_the_budget_leaves_the_checkpoint_unlocked() -> None:
    engine = recurrent(60, pin_budget_frames=5)
    frozen(engine, 1, TEXT, 8)
    reply = engine.manager.handle_admin(Pin(name="a", tokens=pack_tokens(TEXT), ttl_s=5))
    assert isinstance(reply, BadRequest)
    assert "touch 6 frames, the budget is 5" in reply.reason
    engine.manager.handle_admin(Evict(kind="state", num_pages=1))
    assert num_checkpoints(engine) == 0
