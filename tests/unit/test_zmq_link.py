import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from connector.zmq_link import ZERO_COPY_MIN_BYTES, ZmqLinks
from engine.errors import LinkError

TIMEOUT = 10.0


class Recorder:
    """Keeps what an endpoint's handler was told, in order."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, bytes, list[bytes]]] = queue.SimpleQueue()

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        self.events.put(("message", peer, [bytes(frame) for frame in frames]))

    def on_up(self, peer: bytes) -> None:
        self.events.put(("up", peer, []))

    def on_down(self, peer: bytes) -> None:
        self.events.put(("down", peer, []))

    def next(self, kind: str) -> tuple[bytes, list[bytes]]:
        """The next event of `kind`; others before it are passed over."""
        while True:
            found, peer, frames = self.events.get(timeout=TIMEOUT)
            if found == kind:
                return peer, frames


@pytest.fixture
def links() -> Iterator[ZmqLinks]:
    links = ZmqLinks("test")
    yield links
    links.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("links-")]


def test_messages_go_both_ways_with_all_their_frames(links: ZmqLinks):
    listener, dialler = Recorder(), Recorder()
    listening = links.listen("tcp://127.0.0.1:0", listener)
    dialled = links.dial(listening.address, dialler)
    assert not listening.address.endswith(":0")
    big = bytes(ZERO_COPY_MIN_BYTES + 1)
    dialled.send([b"head", b"", big])
    peer, frames = listener.next("message")
    assert frames == [b"head", b"", big]
    listening.send([b"back", memoryview(big)], peer)
    assert dialler.next("message") == (b"", [b"back", big])


def test_order_is_kept_over_many_messages(links: ZmqLinks):
    listener = Recorder()
    dialled = links.dial(links.listen("tcp://127.0.0.1:0", listener).address, Recorder())
    for number in range(500):
        dialled.send([b"%d" % number])
    assert [listener.next("message")[1] for _ in range(500)] == [[b"%d" % number] for number in range(500)]


def test_a_lost_connection_is_told_and_found_again(links: ZmqLinks):
    other = ZmqLinks("other")
    listening = other.listen("tcp://127.0.0.1:0", Recorder())
    dialler = Recorder()
    links.dial(listening.address, dialler)
    dialler.next("up")
    other.close()
    dialler.next("down")
    again = ZmqLinks("again")
    again.listen(listening.address, Recorder())
    dialler.next("up")
    again.close()


def test_a_message_for_nobody_is_told(links: ZmqLinks):
    listener = Recorder()
    links.listen("tcp://127.0.0.1:0", listener).send([b"x"], b"nobody")
    assert listener.next("down")[0] == b"nobody"


def test_a_taken_address_is_named(links: ZmqLinks):
    address = links.listen("tcp://127.0.0.1:0", Recorder()).address
    with pytest.raises(LinkError, match=address):
        links.listen(address, Recorder())


def test_a_timer_fires_again_and_again(links: ZmqLinks):
    fired: queue.SimpleQueue[int] = queue.SimpleQueue()
    links.every(0.01, lambda: fired.put(1))
    assert [fired.get(timeout=TIMEOUT) for _ in range(3)] == [1, 1, 1]


def test_a_closed_endpoint_delivers_nothing_more(links: ZmqLinks):
    listener = Recorder()
    listening = links.listen("tcp://127.0.0.1:0", listener)
    dialler = Recorder()
    dialled = links.dial(listening.address, dialler)
    dialler.next("up")
    listening.close()
    dialler.next("down")
    dialled.send([b"x"])
    dialled.close()
    assert listener.events.empty()
