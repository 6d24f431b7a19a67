"""A draft that is a list of replies."""


class ScriptedRpc:
    """Rpc whose replies are set by the test; an exception among them is raised."""

    def __init__(self) -> None:
        self.sent: list = []
        self.replies: list = []
        self.is_full = False

    def send(self, msg) -> None:
        if self.is_full:
            raise TimeoutError("queue is full")
        self.sent.append(msg)

    def recv(self, _timeout_s: float):
        if not self.replies:
            raise TimeoutError("nothing")
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply
