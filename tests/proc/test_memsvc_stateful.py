"""Random engines against the real service: real client, real server process, real arena, over ipc."""

import mmap
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from memsvc.arena_client import fetch_arena
from memsvc.client import AdminClient, MemoryClient
from memsvc.errors import MemoryServiceError
from memsvc.registration import StepParts
from memsvc.wire.admin import Stats
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import (
    Close,
    Commit,
    Fenced,
    Opened,
    OpenReq,
    Registered,
    Reserve,
    ResetDraft,
    Step,
    Stepped,
    TooLarge,
)
from tests.support.memsvc_process import memory_service
from tests.support.paged_model import ArenaModel, ModelReq, apply_tables

PAGE_SIZE = 4
WINDOW = 8
KINDS = ["target_kv", "draft_kv"]
POOL = ["--arena-bytes", "32K", "--page-size", str(PAGE_SIZE), "--slack-tokens", "8", "--high-watermark", "0"]
POOL += ["--kind", "target_kv:1K:4", "--kind", f"draft_kv:512:4:{WINDOW}", "--pin-budget-frames", "2"]
MAX_NEW = 16

# Few beginnings and short ends, so that prompts share pages, branch, and repeat.
STEMS = ([0, 1] * 12, [0, 1, 1] * 8)
prompts = st.builds(
    lambda stem, length, end: stem[:length] + end,
    st.sampled_from(STEMS),
    st.sampled_from([4, 8, 9, 12, 16]),
    st.lists(st.integers(0, 1), max_size=3),
)
salts = st.sampled_from(["", "", "other"])


class MortalClient(MemoryClient):
    """Registers for a child process that can be killed."""

    def join(self, engine: str, role: str) -> Registered:
        self.body = subprocess.Popen(["sleep", "600"])
        message = self._registration.make_register(engine, role, KINDS, "m")
        return self._registration.began(self._call(msgspec.structs.replace(message, pid=self.body.pid)))

    def die(self) -> None:
        self.body.kill()
        self.body.wait()


class ServiceMachine(RuleBasedStateMachine):
    """One engine with a target; every way in which a request or the engine can end is a rule."""

    run_dir: ClassVar[Path]
    num_examples: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_examples += 1
        self.engine = f"engine{self.num_examples}"
        self.next_rid = 1
        self.admin = AdminClient(self.run_dir)
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.pins: set[str] = set()
        self.evicted_before = self.evicted_now()
        self.join()

    def join(self) -> None:
        self.client = MortalClient(self.run_dir)
        registered = self.client.join(self.engine, "target")
        fd, num_bytes, _device = fetch_arena(registered.fd_endpoint)
        self.arena = ArenaModel(registered.layout, mmap.mmap(fd, num_bytes))
        os.close(fd)
        self.reqs: dict[ReqId, ModelReq] = {}
        self.done_step = 0
        self.last: tuple[Step, Stepped] | None = None

    def evicted_now(self) -> list[int]:
        return self.admin.get_stats().evicted_pages

    # -- one step ---------------------------------------------------------------------------------

    @property
    def next_num(self) -> int:
        return self.client._registration.last_num + 1

    def settle(self, lag: int) -> None:
        """Before the next step: all forwards but the last `lag` have ended, so their lengths are final."""
        self.done_step = max(self.done_step, self.next_num - 1 - lag)
        self.arena.done(self.done_step)
        for req in self.reqs.values():
            req.settle(self.done_step)

    def settle_for_close(self, rids: list[ReqId], lag: int) -> None:
        """A close is sent only when nothing that names the request is in flight any more."""
        running = [entry for rid in rids for entry in self.reqs[rid].running if entry[0] == self.next_num - 1]
        self.settle(0 if running else lag)

    def step(self, **parts) -> Stepped:
        """Commit what is final, and do what else is asked."""
        made = StepParts(done_step=self.done_step, commit=self.commit(), **parts)
        message = self.client._registration.make_step(made)
        stepped = self.client.step(made)
        self.last = message, stepped
        for close in made.closes:
            for rid in close.rids:
                del self.reqs[rid]
        apply_tables(self.reqs, stepped)
        return stepped

    def commit(self) -> Commit:
        commit = Commit([], [], [], [])
        for req in self.reqs.values():
            num_known = max(req.num_known, req.final_len)
            commit.rids.append(req.rid)
            commit.target_lens.append(req.final_len)
            commit.draft_lens.append(req.final_written)
            commit.tokens.append(pack_tokens(req.tokens[req.num_known : num_known]))
            req.target_len, req.draft_len, req.num_known = req.final_len, req.final_written, num_known
            full = req.target_len // PAGE_SIZE * PAGE_SIZE
            self.published.update((req.salt, tuple(req.tokens[:end])) for end in range(PAGE_SIZE, full + 1, PAGE_SIZE))
        return commit

    # -- rules ------------------------------------------------------------------------------------

    @rule(prompt=prompts, salt=salts, copies=st.integers(1, 2), lag=st.integers(0, 1))
    def open_reqs(self, prompt: list[int], salt: str, copies: int, lag: int) -> None:
        """One request, or two equal ones, which then publish equal pages."""
        rids = [ReqId(self.next_rid + i) for i in range(copies)]
        self.next_rid += copies
        self.settle(lag)
        stepped = self.step(opens=[OpenReq(rid, pack_tokens(prompt), MAX_NEW, salt, rid % 2) for rid in rids])
        for rid, opened in zip(rids, stepped.opened, strict=False):
            assert isinstance(opened, Opened), opened
            assert opened.rid == rid
            self.adopt(prompt, salt, opened)
        if stepped.open_no_room is None:
            assert len(stepped.opened) == copies
        assert self.reqs, "an empty pool has no room for a request that is not too large"

    def adopt(self, prompt: list[int], salt: str, opened: Opened) -> None:
        self.check_hit(prompt, salt, opened)
        hit = opened.prefix_len
        self.reqs[opened.rid] = ModelReq(
            rid=opened.rid,
            salt=salt,
            prompt_len=len(prompt),
            tokens=list(prompt),
            tables=[{index: page for index, page in enumerate(pages) if page} for pages in opened.pages],
            valid_from=opened.draft_valid_from,
            target_len=hit,
            draft_len=hit,
            computed_len=hit,
            written_len=hit,
            final_len=hit,
            final_written=hit,
            num_known=len(prompt),
        )

    def check_hit(self, prompt: list[int], salt: str, opened: Opened) -> None:
        # The last token is never served from the cache.
        ends = range(PAGE_SIZE, len(prompt), PAGE_SIZE)
        longest = max([0, *(end for end in ends if (salt, tuple(prompt[:end])) in self.published)])
        assert opened.prefix_len <= longest, f"hit of {opened.prefix_len} tokens, only {longest} were ever published"
        if self.evicted_now() == self.evicted_before:
            assert opened.prefix_len == longest, f"hit of {opened.prefix_len} tokens, {longest} are cached"
        assert 0 <= opened.draft_valid_from <= opened.prefix_len

    @precondition(lambda self: self.reqs)
    @rule(data=st.data(), lag=st.integers(0, 1))
    def forward_some(self, data: st.DataObject, lag: int) -> None:
        """Chunks of prompts, and blocks of generated tokens, for some requests."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.reqs)), min_size=1, unique=True))
        self.forward(data, {rid: data.draw(st.integers(1, 6)) for rid in chosen}, lag)

    @precondition(lambda self: self.reqs)
    @rule(data=st.data(), num=st.integers(1, 6), times=st.integers(1, 5), lag=st.integers(0, 1))
    def forward_all(self, data: st.DataObject, num: int, times: int, lag: int) -> None:
        """The rest of every prompt, and a block of each request that has its prompt."""
        for _ in range(times):
            nums = {rid: max(num, len(req.tokens) - req.computed_len) for rid, req in self.reqs.items()}
            self.forward(data, nums, lag)
            self.bytes_are_right()

    def forward(self, data: st.DataObject, nums: dict[ReqId, int], lag: int) -> None:
        nums = {rid: num for rid, num in nums.items() if self.room(self.reqs[rid]) >= num}
        self.settle(lag)
        slots = [self.reqs[rid].computed_len + num - self.reqs[rid].final_len for rid, num in nums.items()]
        stepped = self.step(reserve=Reserve(list(nums), slots))
        if stepped.no_room is None:
            for rid, num in nums.items():
                self.compute(data, self.reqs[rid], num)
            return
        victims = stepped.no_room.victims
        assert set(victims) <= set(self.reqs)
        assert victims or stepped.no_room.waiting_on
        if victims:
            self.settle_for_close(victims, lag)
            self.step(closes=[Close(victims, "retract")])

    def room(self, req: ModelReq) -> int:
        return req.prompt_len + MAX_NEW - req.computed_len

    def compute(self, data: st.DataObject, req: ModelReq, num: int) -> None:
        """Compute num positions; past the prompt only some are accepted."""
        prompt_left = max(0, len(req.tokens) - req.computed_len)
        accepted = num if num <= prompt_left else data.draw(st.integers(max(1, prompt_left), num))
        for _ in range(req.computed_len + accepted - len(req.tokens)):
            # The next token follows from the text, so that equal requests publish equal pages.
            req.tokens.append(1 - req.tokens[-2:][0])
        begin, req.computed_len = req.computed_len, req.computed_len + accepted
        self.arena.write(req, 0, begin, req.computed_len)
        self.arena.write_rejected(req, req.computed_len, begin + num)
        written = data.draw(st.integers(max(req.written_len, req.computed_len - 3), req.computed_len))
        self.arena.write(req, 1, req.written_len, written)
        req.written_len = written
        self.arena.submit(self.next_num - 1, req, begin)

    @precondition(lambda self: self.reqs)
    @rule(data=st.data(), reason=st.sampled_from(["finish", "abort", "retract"]), lag=st.integers(0, 1))
    def close_req(self, data: st.DataObject, reason: str, lag: int) -> None:
        rid = data.draw(st.sampled_from(sorted(self.reqs)))
        self.settle_for_close([rid], lag)
        self.step(closes=[Close([rid], reason)])

    @precondition(lambda self: self.reqs)
    @rule(data=st.data())
    def lose_draft(self, data: st.DataObject) -> None:
        rids = data.draw(st.lists(st.sampled_from(sorted(self.reqs)), min_size=1, unique=True))
        self.settle(0)
        self.step(reset_draft=ResetDraft(rids))
        # After the commit of the same step, which still counts the rows that were lost.
        for rid in rids:
            self.reqs[rid].lose_draft()

    @precondition(lambda self: len(self.reqs) > 1)
    @rule(data=st.data())
    def retract_all_but_the_elder(self, data: st.DataObject) -> None:
        elder, *others = sorted(self.reqs)
        assert self.admin.get_stats().elder == elder
        self.settle(0)
        self.step(closes=[Close(others, "retract")])
        num = min(6, self.room(self.reqs[elder]))
        if num:
            self.settle(0)
            stepped = self.step(reserve=Reserve([elder], [num]))
            assert stepped.no_room is None, f"the elder alone does not fit: {stepped.no_room}"
            self.compute(data, self.reqs[elder], num)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([self.refuse_too_large, self.send_the_last_step_again, self.leave_a_gap]))()

    def refuse_too_large(self) -> None:
        rid, self.next_rid = ReqId(self.next_rid), self.next_rid + 1
        self.settle(0)
        (refused,) = self.step(opens=[OpenReq(rid, pack_tokens([1] * 4000), 1)]).opened
        assert isinstance(refused, TooLarge)
        assert refused.frames_needed > refused.frames_usable

    def send_the_last_step_again(self) -> None:
        if self.last is not None:
            assert self.client._rpc.call(self.last[0], 20) == self.last[1]

    def leave_a_gap(self) -> None:
        self.client._registration.last_num += 2
        with pytest.raises(MemoryServiceError, match="after step"):
            self.client.step(StepParts(closes=[Close(list(self.reqs))]))
        self.client._registration.last_num -= 2

    @rule(data=st.data(), prompt=prompts, salt=salts)
    def administer(self, data: st.DataObject, prompt: list[int], salt: str) -> None:
        match data.draw(st.sampled_from(["match", "flush", "evict", "pin", "unpin"])):
            case "match":
                self.match(prompt, salt)
            case "flush":
                self.flush()
            case "evict":
                self.admin.evict(data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 5)))
            case "pin":
                self.pin(prompt, data.draw(st.sampled_from("ab")))
            case "unpin" if self.pins:
                self.admin.unpin(self.pins.pop())

    def match(self, prompt: list[int], salt: str) -> None:
        matched = self.admin.match(pack_tokens(prompt), salt).prefix_len
        assert matched <= len(prompt)
        assert matched == 0 or (salt, tuple(prompt[:matched])) in self.published

    def flush(self) -> None:
        self.admin.flush()
        if not self.reqs and not self.pins:
            self.published.clear()
            self.evicted_before = self.evicted_now()

    def pin(self, prompt: list[int], name: str) -> None:
        try:
            pinned = self.admin.pin(name, pack_tokens(prompt), 600.0)
        except MemoryServiceError:
            return
        self.pins.add(name)
        assert pinned.pinned_len <= len(prompt)
        assert pinned.budget_left >= 0

    @rule(is_killed=st.booleans())
    def start_again(self, is_killed: bool) -> None:
        """The target dies, or leaves; the next one of the same name finds the cache."""
        old = self.client
        registered = old.registered
        assert registered is not None
        if not is_killed:
            old.leave()
        self.end_client()
        self.join()
        stale = Step(registered.epoch, 1, 0, closes=[])
        assert self.client._rpc.call(stale, 20) == Fenced(registered.epoch)

    def end_client(self) -> None:
        self.client.die()
        while (stats := self.admin.get_stats()).num_clients or any(kind.num_quarantine for kind in stats.kinds):
            pass
        self.client._registration.left()
        self.client.close()
        self.arena.memory.close()

    # -- what must hold -----------------------------------------------------------------------------

    @invariant()
    def bytes_are_right(self) -> None:
        for req in self.reqs.values():
            self.arena.check(self.arena.readable(req, req.target_len), f"rid {req.rid}")
        for step, slots in self.arena.in_flight:
            self.arena.check(slots, f"forward of step {step}")

    @invariant()
    def everything_adds_up(self) -> None:
        stats = self.admin.get_stats()
        check_sums(stats)
        assert stats.num_reqs == len(self.reqs)
        assert self.admin.check().problems == []

    def teardown(self) -> None:
        self.end_client()
        for name in self.pins:
            self.admin.unpin(name)
        self.admin.flush()
        stats = self.admin.get_stats()
        empty = stats.frames_empty + stats.frames_dummy + stats.frames_exchange + stats.frames_shared
        assert empty == stats.num_frames, f"{stats.num_frames - empty} frames are not empty: {stats}"
        self.admin.close()


def check_sums(stats: Stats) -> None:
    """Every frame and every page is in exactly one state."""
    frames = stats.frames_dummy + stats.frames_exchange + stats.frames_shared + stats.frames_empty
    assert frames + sum(kind.num_frames for kind in stats.kinds) == stats.num_frames
    for kind in stats.kinds:
        states = (kind.num_free, kind.num_private, kind.num_tree, kind.num_pinned, kind.num_limbo, kind.num_quarantine)
        assert sum(states) == kind.num_pages_cut, kind


def test_the_service_keeps_its_promises_over_ipc(tmp_path: Path):
    ServiceMachine.run_dir = tmp_path
    with memory_service(tmp_path, POOL):
        run_state_machine_as_test(
            ServiceMachine,
            # Shrinking would start hundreds of processes; the machine on the manager alone shrinks.
            settings=settings(
                stateful_step_count=40,
                phases=[Phase.explicit, Phase.reuse, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
