"""Long prompts are encoded beside the loop: a megabyte takes half a second."""

import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from memsvc.wire.base import ReqId
from tokenizer_proc.encode import Text


class EncodeThreads:
    """Results come in the order in which they are ready; fd is readable while there are any."""

    def __init__(self, encode: Callable[[Text], "array[int]"], num_threads: int) -> None:
        self._encode = encode
        self._results: SimpleQueue[tuple[ReqId, array[int] | Exception]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self, rid: ReqId, text: Text) -> None:
        """Encode text; (rid, token ids) or (rid, exception) comes out of take() later."""
        self._threads.submit(self._run, rid, text)

    def take(self) -> "list[tuple[ReqId, array[int] | Exception]]":
        """The results that are there."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        results: list[tuple[ReqId, array[int] | Exception]] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except Empty:
                return results

    def close(self) -> None:
        """Waits for prompts that are being encoded, drops those that are not yet."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self.fd)

    def _run(self, rid: ReqId, text: Text) -> None:
        try:
            result = self._encode(text)
        except Exception as error:
            # Whatever it is, the request must hear of it: it is raised again where it is answered.
            result = error
        self._results.put((rid, result))
        os.eventfd_write(self.fd, 1)
