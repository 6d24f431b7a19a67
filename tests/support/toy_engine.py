"""A target worker without torch models, threads or sockets: real scheduler, real memory manager, toy model.

The toy model's KV of a token is the token itself, kept per (page, offset). Its next token is a hash of
everything it reads through the page table, so a page that was freed, swapped or overwritten too early
changes the text. The toy draft keeps its own pages the same way and checks what it finds there.
"""

from collections.abc import Callable, Iterable

from memsvc.core.manager import MemoryManager
from memsvc.device.page_table import PageTables
from memsvc.device.state_table import StateTable
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindSpec
from target_worker.config import TargetConfig
from target_worker.mem_link import MemLink
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows, Req, state_reach
from target_worker.scheduler import Links, Scheduler
from target_worker.state_link import StateLink
from target_worker.trace import StepTrace
from target_worker.width import Width
from tests.support.toy_server import (
    DRAFT_PAGE_BYTES,
    EOS,
    TARGET_PAGE_BYTES,
    VOCAB,
    ToyClient,
    ToyServer,
    ToyText,
    next_token,
    pool_config,
)
from tests.support.toy_states import NUM_LAYERS, ToyStates, toy_kinds
from tests.support.toy_watch import PoolWatch


class ToySpec:
    """SpecLink with the right continuation (every wrong_every-th draft is wrong) and draft pages to check."""

    def __init__(self, page_size: int, wrong_every: int, watch: PoolWatch, exchange: list[int]) -> None:
        """exchange: where the toy target leaves the tokens of a forward, its features."""
        self.is_up = True
        self.window = 0
        """Tokens of context that it reads, 0 = all."""
        self._exchange = exchange
        self._watch = watch
        self.last = None
        self.memory: dict[tuple[int, int], int] = {}
        self.num_context_tokens = 0
        self.num_messages = 0
        self._page_size = page_size
        self._wrong_every = wrong_every
        self._known: set[ReqId] = set()
        self._came_back = False
        self._calls = 0

    def die(self) -> None:
        self.is_up = False
        self._known.clear()

    def come_back(self) -> None:
        self._came_back = not self.is_up

    def poll(self) -> bool:
        if self._came_back:
            self.is_up, self._came_back = True, False
            return True
        return False

    def close(self, req: Req) -> None:
        self._known.discard(req.rid)
        req.draft.pending.clear()
        req.draft.is_open = False

    def propose(self, blocks: list[Req], known: Iterable[Req], clear: list[PageId], num_drafts: int) -> dict:
        if not self.is_up:
            return {}
        known = list(known)
        self.num_messages += bool(blocks or any(req.draft.pending for req in known))
        self._watch.clear("draft_kv", clear)
        for page in clear:
            self.memory = {place: token for place, token in self.memory.items() if place[0] != page}
        clear.clear()
        for req in known:
            req.draft.is_open = True
            self._known.add(req.rid)
            for rows in req.draft.pending:
                self._write(req, rows)
            req.draft.pending.clear()
        return {req.rid: self._draft(req, num_drafts) for req in blocks}

    def _place(self, req: Req, position: int) -> tuple[int, int]:
        page = req.draft.pages[position // self._page_size]
        assert page > 0, f"rid {req.rid} has no draft page at {position}"
        return page, position % self._page_size

    def _write(self, req: Req, rows: FeatureRows) -> None:
        assert rows.start == req.draft.written_len, f"{rows} after {req.draft.written_len}"
        for index in range(rows.num):
            place = self._place(req, rows.start + index)
            self._watch.write("draft_kv", place[0])
            self.memory[place] = self._exchange[rows.row + index]
        req.draft.written_len = rows.start + rows.num

    def _draft(self, req: Req, num_drafts: int) -> list[int]:
        assert req.draft.written_len == req.computed_len == len(req.tokens) - 1
        first = max(req.draft.valid_from, req.computed_len - self.window + 1 if self.window else 0)
        for position in range(first, req.computed_len):
            found = self.memory.get(self._place(req, position))
            assert found == req.tokens[position], f"draft rid {req.rid} reads {found} at {position}"
            self.num_context_tokens += 1
        drafts = []
        for _ in range(num_drafts):
            self._calls += 1
            token = next_token(req.tokens + drafts)
            drafts.append(token if self._calls % self._wrong_every else (token + 1) % VOCAB)
        return drafts


class ToyExecutor:
    """Executor with the toy model; asserts that what it reads through the tables is what was committed."""

    def __init__(
        self, tables: PageTables, exchange: list[int], watch: PoolWatch, states: ToyStates | None = None
    ) -> None:
        """exchange: one place for each row that a forward may have; none without a draft."""
        self._watch = watch
        self._exchange = exchange
        self.clock = 0.0
        """Seconds that forwards took: what seconds_of says of each."""
        self.seconds_of: Callable[[StepPlan], float] = lambda _plan: 1.0
        self.memory: dict[tuple[int, int], int] = {}
        self.states = states
        self._tables = tables

    def run(self, plan: StepPlan, drafts: dict, clear: list[PageId], _trace: StepTrace) -> dict[Req, list[int]]:
        self._watch.clear("target_kv", clear)
        for page in clear:
            self.memory = {place: token for place, token in self.memory.items() if place[0] != page}
        self.clock += self.seconds_of(plan)
        emitted: dict[Req, list[int]] = {}
        row = plan.feature_row
        for req in plan.decode:
            block = [req.tokens[-1], *drafts.get(req.rid, [])]
            logits = self._forward(req, block, num_certain=1)
            self._tap(block, row)
            tokens = [logits[0]]
            while len(tokens) < len(block) and tokens[-1] == block[len(tokens)] and tokens[-1] != EOS:
                tokens.append(logits[len(tokens)])
            emitted[req] = tokens[: req.num_left]
            self._advance(req, len(emitted[req]), row)
            row += len(block)
        for req, num in plan.chunks.items():
            chunk = req.tokens[req.computed_len : req.computed_len + num]
            is_last = num == req.extend_len
            last = self._forward(req, chunk, num_certain=state_reach(num, is_last=is_last))[-1]
            self._tap(chunk, row)
            if is_last:
                emitted[req] = [last]
            self._advance(req, num, row)
            row += num
        return emitted

    def catch_up(self, reqs: list[Req]) -> None:
        for req in reqs:
            if self.states is not None:
                self.states.run(req, [], 0)

    def stops(self, _req: Req, token: int) -> bool:
        return token == EOS

    def _tap(self, tokens: list[int], row: int) -> None:
        if self._exchange:
            assert row + len(tokens) <= len(self._exchange), f"features of {len(tokens)} rows at {row}"
            self._exchange[row : row + len(tokens)] = tokens

    def _advance(self, req: Req, num: int, row: int) -> None:
        if self._exchange:
            req.draft.pending.append(FeatureRows(req.computed_len, num, row))
        req.computed_len += num

    def _forward(self, req: Req, block: list[int], num_certain: int) -> list[int]:
        if self.states is not None:
            self.states.run(req, block, num_certain)
        start, size = req.computed_len, self._tables.page_size
        table = self._tables.table[req.row].tolist()
        for position, token in enumerate(block, start):
            if position < req.end_len:
                assert table[position // size] > 0, f"rid {req.rid} has no page for position {position}"
                self.memory[table[position // size], position % size] = token
        context = [self.memory.get((table[p // size], p % size), -1) for p in range(start)]
        assert context == req.tokens[:start], f"rid {req.rid} reads another text below {start}"
        return [next_token(context + block[: i + 1]) for i in range(len(block))]


class ToyEngine(ToyServer):
    """Everything wired together. k = 0 means no draft process and no draft pages."""

    def __init__(
        self, *, num_frames: int, page_size: int = 4, k: int = 0, max_running: int = 4, max_prefill: int = 16,
        wrong_every: int = 3, manager: MemoryManager | None = None, engine: str = "toy", recurrent: bool = False,
        width: Width | None = None, window: int = 0,
    ) -> None:  # fmt: skip
        """width: chooses the drafts of each step; None drafts k in all. window: of the draft, in tokens, 0 = none."""
        kinds = [KindSpec("target_kv", TARGET_PAGE_BYTES, page_size), *(toy_kinds() if recurrent else [])]
        if k:
            kinds.append(KindSpec("draft_kv", DRAFT_PAGE_BYTES, page_size, window=window))
        self.manager = manager or MemoryManager(pool_config(kinds, page_size, num_frames))
        client = ToyClient(self.manager, engine)
        config = TargetConfig(
            run_dir="", model_path="", max_running_requests=max_running, max_prefill_tokens=max_prefill,
            page_size=page_size, num_draft_tokens=k, draft=k > 0, target_layer_ids=(0,) if k else (),
        )  # fmt: skip
        watch = PoolWatch(self.manager)
        tables = PageTables(max_reqs=max_running, max_pages=256, page_size=page_size)
        table = StateTable(max_reqs=max_running, num_layers=NUM_LAYERS) if recurrent else None
        self.states = ToyStates(table, page_size, 1 + k, watch) if table else None
        exchange = [-1] * config.max_step_rows if k else []
        self.executor = ToyExecutor(tables, exchange, watch, self.states)
        states = StateLink(client.registered.layout, table, self.executor.catch_up) if table else None
        mem = MemLink(client, client.registered.layout, tables, states)
        self.text = ToyText()
        self.spec = ToySpec(page_size, wrong_every, watch, exchange) if k else None
        if self.spec is not None:
            self.spec.window = window
        links = Links(mem, self.text, self.spec)
        self.scheduler = Scheduler(config, links, self.executor, width, lambda: self.executor.clock)
        self.prompts: dict[ReqId, tuple[list[int], int]] = {}

    def step(self) -> None:
        """See ToyServer."""
        self.scheduler.step()
