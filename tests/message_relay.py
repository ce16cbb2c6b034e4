"""A relay between decode nodes and a prefill node that understands messages: loses, doubles, holds and invents them.

Each connection of a decode node gets one of its own to the prefill node, so that both ends still see one peer each.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from connector.peer_messages import (
    FromDecode,
    FromPrefill,
    PeerHello,
    decode_from_decode_node,
    decode_from_prefill_node,
)

Frames = list[bytes]
Rule = Callable[[Frames], list[Frames]]
"""What is passed on in place of one message."""

POLL_MS = 2


def drop(frames: Frames) -> list[Frames]:
    return []


def twice(frames: Frames) -> list[Frames]:
    return [frames, frames]


class MessageRelay:
    """Listens on a free port; `target` is dialled when the first message for it comes."""

    def __init__(self) -> None:
        self.target = ""
        self.seen: list[FromDecode | FromPrefill] = []
        """Every message that came in, before any rule."""
        self._rules: dict[type, Rule] = {}
        self._held: deque[tuple[bytes, bool, Frames]] = deque()
        self._kinds_held: set[type] = set()
        self._released: deque[tuple[bytes, bool, Frames]] = deque()
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.set_hwm(0)
        self._front.bind("tcp://127.0.0.1:0")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._greeted = b""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="message-relay")
        self._thread.start()

    def on(self, kind: type, rule: Rule) -> None:
        """From now on `rule` decides what becomes of messages of this kind."""
        self._rules[kind] = rule

    def hold(self, *kinds: type) -> None:
        """Messages of these kinds wait here until `release`."""
        self._kinds_held.update(kinds)

    def release(self, order: Callable[[list[Frames]], list[Frames]] = list, times: int = 1) -> int:
        """Lets go all that is held, in `order`, each `times`; nothing is held any more. How many were held."""
        self._kinds_held.clear()
        held = [self._held.popleft() for _ in range(len(self._held))]
        ways = {id(frames): (identity, is_back) for identity, is_back, frames in held}
        for frames in order([frames for _, _, frames in held]):
            self._released.extend([(*ways[id(frames)], frames)] * times)
        return len(held)

    def say_to_decode(self, frames: Frames) -> None:
        """A message out of nowhere, to the decode node that said hello last."""
        self._released.append((self._greeted, True, frames))

    def num_held(self, kind: type) -> int:
        return sum(isinstance(_decode(is_back, frames), kind) for _, is_back, frames in list(self._held))

    def num_seen(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in list(self.seen))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closed.is_set():
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(POLL_MS))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                self._take(identity, False, frames)
            for identity, back in list(self._backs.items()):
                if back in ready:
                    self._take(identity, True, back.recv_multipart())
            while self._released:
                self._pass_on(*self._released.popleft())

    def _take(self, identity: bytes, is_back: bool, frames: Frames) -> None:
        message = _decode(is_back, frames)
        self.seen.append(message)
        if isinstance(message, PeerHello):
            self._greeted = identity
        if type(message) in self._kinds_held:
            self._held.append((identity, is_back, frames))
            return
        rule = self._rules.get(type(message))
        for passed in [frames] if rule is None else rule(frames):
            self._pass_on(identity, is_back, passed)

    def _pass_on(self, identity: bytes, is_back: bool, frames: Frames) -> None:
        if is_back:
            self._front.send_multipart([identity, *frames])
        else:
            self._back_of(identity).send_multipart(frames)

    def _back_of(self, identity: bytes) -> "zmq.Socket[bytes]":
        if identity not in self._backs:
            socket = self._context.socket(zmq.DEALER)
            socket.set_hwm(0)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.connect(self.target)
            self._backs[identity] = socket
        return self._backs[identity]


def _decode(is_back: bool, frames: Frames) -> FromDecode | FromPrefill:
    decoder = decode_from_prefill_node if is_back else decode_from_decode_node
    return decoder.decode(frames[0])


@contextmanager
def running_message_relay() -> Iterator[MessageRelay]:
    relay = MessageRelay()
    try:
        yield relay
    finally:
        relay.close()
