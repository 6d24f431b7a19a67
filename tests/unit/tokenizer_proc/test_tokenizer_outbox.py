"""A receiver that is away or slow never blocks the loop, and gets all of it in order later."""

import zmq

from memsvc.wire.base import ReqId
from memsvc.wire.codec import decoder
from memsvc.wire.text import Abort, TokToTarget
from tokenizer_proc.outbox import Outbox


def test_what_a_full_socket_does_not_take_is_kept_and_sent_in_order() -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        for socket in (push, pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(1)
        pull.bind("inproc://outbox")
        push.connect("inproc://outbox")
        outbox = Outbox(push)
        for number in range(20):
            outbox.send(Abort(ReqId(number)))
        assert outbox.is_waiting
        received = []
        while len(received) < 20:
            if outbox.is_waiting and push.poll(0, zmq.POLLOUT):
                outbox.flush()
            assert pull.poll(5000)
            received.append(decoder(TokToTarget).decode(pull.recv()))
        assert received == [Abort(ReqId(number)) for number in range(20)]
        assert not outbox.is_waiting
