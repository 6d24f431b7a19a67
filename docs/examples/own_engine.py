"""A made-up engine that keeps its KV in memsvc, through the client alone.

A token's "KV" is its id, written into its slot. The order of calls is register, map, open, reserve, commit, close; the
second request finds the first one's pages. Run: .venv/bin/python docs/examples/own_engine.py
"""

import mmap
import os
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

from memsvc.arena_client import fetch_arena
from memsvc.client import AdminClient, MemoryClient
from memsvc.inspect import as_text
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, Opened, OpenReq, Reserve

PAGE_SIZE, TOKEN_BYTES = 16, 64
FLAGS = ["--arena-bytes", "1M", "--page-size", str(PAGE_SIZE), "--kind", f"target_kv:{TOKEN_BYTES * PAGE_SIZE}:16"]


class Engine:
    """One request at a time; a real one puts its whole batch into each Step."""

    def __init__(self, client: MemoryClient) -> None:
        self.client = client
        registered = client.register("made-up", "target", ["target_kv"], model_fingerprint="none")
        self.stride = registered.layout.kinds[0].stride_bytes
        fd, num_bytes, _device = fetch_arena(registered.fd_endpoint)
        self.arena = mmap.mmap(fd, num_bytes)
        os.close(fd)
        self.last_num = 0

    def step(self, **parts):
        """One Step. This engine has no forward running beside it, so every earlier Step is done."""
        stepped = self.client.step(StepParts(done_step=self.last_num, **parts))
        self.last_num = stepped.num
        return stepped

    def run(self, rid: ReqId, prompt: list[int], max_new: int) -> int:
        """Serve one request; returns how many prompt tokens were cached."""
        (opened,) = self.step(opens=[OpenReq(rid, pack_tokens(prompt), max_new)]).opened
        assert isinstance(opened, Opened), f"refused: {opened}"
        table, tokens, computed = opened.pages[0], list(prompt), opened.prefix_len
        while len(tokens) < len(prompt) + max_new:
            # The table grows by what the reply lists; slots that it has already are not listed again.
            reserved = self.step(reserve=Reserve([rid], [len(tokens) - computed]))
            assert reserved.no_room is None, f"no room: {reserved.no_room}"
            table.extend(reserved.grow_pages)
            for position in range(computed, len(tokens)):
                slot = table[position // PAGE_SIZE] * self.stride + position % PAGE_SIZE * TOKEN_BYTES
                self.arena[slot : slot + 4] = pack_tokens([tokens[position]])
            computed = len(tokens)
            tokens.append(sum(tokens) % 1000)
            self.step(commit=Commit([rid], [computed], [computed], [pack_tokens(tokens[-1:])]))
        self.step(closes=[Close([rid])])
        return opened.prefix_len


def main() -> None:
    """Start a service, wait until it is ready (or Register is sent again), run two requests, look inside."""
    command = [sys.executable, "-m", "memsvc", *FLAGS, "--run-dir"]
    with tempfile.TemporaryDirectory() as run_dir, Popen([*command, run_dir], stdout=PIPE, text=True) as service:
        try:
            assert any(line.startswith("ready:") for line in service.stdout or ()), "the service did not start"
            with MemoryClient(Path(run_dir)) as client, AdminClient(Path(run_dir)) as admin:
                engine = Engine(client)
                prompt = [7 * i % 1000 for i in range(100)]
                print("first request: cached", engine.run(ReqId(1), prompt, max_new=20))
                print("second request: cached", engine.run(ReqId(2), [*prompt, 1, 2, 3], max_new=20))
                print(as_text(admin.get_stats()), as_text(admin.check()), sep="\n\n")
        finally:
            service.terminate()


if __name__ == "__main__":
    main()
