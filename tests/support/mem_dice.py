"""Random steps that a correct engine might send."""

from random import Random
from typing import Any

from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, OpenReq, Reserve, ResetDraft
from tests.support.mem_builders import PAGE_SIZE
from tests.support.mem_model import ModelEngine, ModelReq


class Rolls:
    """Fills in the parts of a step, and tells the engine's model what the step will do."""

    def __init__(self, max_extend: int, lagging: bool = True) -> None:
        self.max_extend = max_extend
        self.lagging = lagging
        """Whether recurrent states may stand behind the last page edge."""
        self.texts: list[list[int]] = []
        """What was ever committed, to open again."""
        self.next_rid = 1

    def step(self, dice: Random, engine: ModelEngine, parts: dict[str, Any]) -> list[OpenReq]:
        """All parts; returns the opens."""
        self.commit(dice, engine, parts)
        self.freeze(dice, engine, parts)
        if dice.random() < 0.1:
            rids = [rid for rid in engine.reqs if dice.random() < 0.5]
            for rid in rids:
                engine.reset_req(rid)
            parts["reset_draft"] = ResetDraft(rids=[ReqId(rid) for rid in rids])
        self.close(parts, engine)
        self.reserve(dice, engine, parts)
        return self.opens(dice, parts)

    def commit(self, dice: Random, engine: ModelEngine, parts: dict[str, Any]) -> None:
        rows: list[tuple[int, int, int, bytes]] = []
        for rid in [rid for rid in engine.reqs if dice.random() < 0.8]:
            req = engine.reqs[rid]
            target = dice.choice([req.slots, dice.randint(req.target_len, req.slots)])
            target = max(req.target_len, min(target, req.limit))
            draft = req.draft_len
            if dice.random() < 0.8:
                draft = max(draft, min(target, req.draft_slots))
            need = max(0, target - len(req.tokens))
            tokens = [dice.randint(0, 1) for _ in range(need + dice.randint(0, 2))]
            tokens = tokens[: max(need, req.limit - len(req.tokens))]
            engine.commit_req(rid, target, draft, tokens, self.state_at(dice, req, target))
            engine.published_by(rid)
            self.texts.append(list(req.tokens))
            rows.append((rid, target, draft, pack_tokens(tokens)))
        if rows:
            rids, targets, drafts, tokens_list = (list(column) for column in zip(*rows, strict=True))
            parts["commit"] = Commit(rids=rids, target_lens=targets, draft_lens=drafts, tokens=tokens_list)

    def state_at(self, dice: Random, req: ModelReq, target: int) -> int | None:
        if not self.lagging or dice.random() < 0.6:
            return None
        edges = range(req.state.at, target // PAGE_SIZE * PAGE_SIZE + 1, PAGE_SIZE)
        return dice.choice(edges) if edges else None

    def freeze(self, dice: Random, engine: ModelEngine, parts: dict[str, Any]) -> None:
        """States of requests that go on, and of such as end in the same step."""
        parts["closes"] = self.closes(dice, engine)
        closing = {rid for part in parts["closes"] for rid in part.rids}
        able = [rid for rid, req in engine.reqs.items() if req.state.can_freeze]
        rids = [rid for rid in able if dice.random() < (0.8 if rid in closing else 0.4)]
        if rids:
            parts["freeze"] = engine.freeze_part(rids)

    def closes(self, dice: Random, engine: ModelEngine) -> list[Close]:
        wanted = {rid for rid in engine.retract if rid in engine.reqs and dice.random() < 0.9}
        ended = {rid for rid, req in engine.reqs.items() if req.target_len == req.limit}
        others = {rid for rid in engine.reqs if dice.random() < 0.07}
        reasons = {"retract": wanted, "finish": ended - wanted, "abort": others - wanted - ended}
        engine.retract = []
        return [Close(rids=[ReqId(rid) for rid in rids], reason=r) for r, rids in reasons.items() if rids]

    def close(self, parts: dict[str, Any], engine: ModelEngine) -> None:
        for part in parts["closes"]:
            for rid in part.rids:
                engine.closed_req(rid)

    def reserve(self, dice: Random, engine: ModelEngine, parts: dict[str, Any]) -> None:
        rids = [rid for rid in engine.reqs if dice.random() < 0.8]
        nums = []
        for rid in rids:
            req = engine.reqs[rid]
            rest = max(0, len(req.tokens) - req.target_len)
            nums.append(
                min(
                    self.max_extend,
                    req.limit - req.target_len,
                    dice.choice([rest, rest, rest + 3, dice.randint(0, 12)]),
                )
            )
        if rids:
            parts["reserve"] = Reserve(rids=[ReqId(rid) for rid in rids], nums=nums)

    def opens(self, dice: Random, parts: dict[str, Any]) -> list[OpenReq]:
        opens = []
        for _ in range(dice.choice([0, 0, 1, 1, 2])):
            text = dice.choice(self.texts) if self.texts and dice.random() < 0.7 else []
            prompt = text[: dice.randint(0, len(text))] + [dice.randint(0, 1) for _ in range(dice.randint(1, 6))]
            op = OpenReq(
                rid=ReqId(self.next_rid),
                tokens=pack_tokens(prompt[:18]),
                max_new=dice.randint(0, 8),
                salt=dice.choice(["", "", "", "s"]),
                priority=dice.randint(0, 1),
            )
            self.next_rid += 1
            opens.append(op)
        parts["opens"] = opens
        return opens
