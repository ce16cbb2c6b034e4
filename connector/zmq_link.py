"""Links over ZeroMQ: one thread owns all sockets of one `ZmqLinks`; other threads hand it messages through a deque.

A listener is a ROUTER, a dialled end a DEALER with a monitor, so that a lost connection is known at once and not only
after missed heartbeats. Frames go out without a copy: zmq reads the buffers later, hence "must not change" in `send`.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from connector.link import Endpoint, Frame, LinkHandler, Links
from engine.errors import LinkError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 5.0
LINGER_MS = 1000
"""How long a closing socket may still flush: the last message of a node says how a request ended."""
MAX_MESSAGE_BYTES = 256 << 20
ZERO_COPY_MIN_BYTES = 64 << 10
"""Below this a copy is cheaper than the tracking of a zero-copy frame (pyzmq's own default threshold)."""
MAX_MESSAGES_PER_TURN = 64
"""One busy socket must not starve the others."""


@dataclass(slots=True)
class _Timer:
    due: float
    seconds: float
    callback: Callable[[], None]


class ZmqLinks(Links):
    """The thread and its sockets."""

    def __init__(self, name: str) -> None:
        self._context = zmq.Context()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_lock = threading.Lock()
        address = f"inproc://wake-{id(self)}"
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind(address)
        self._wake_sender = self._context.socket(zmq.PAIR)
        self._wake_sender.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._ready: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._endpoints: list[_ZmqEndpoint] = []
        self._timers: list[_Timer] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"links-{name}", daemon=True)
        self._thread.start()

    def listen(self, address: str, handler: LinkHandler) -> Endpoint:
        socket = self._make_socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise LinkError(f"cannot listen on {address}: {error}") from error
        return self._adopt(_Listener(self, socket, handler))

    def dial(self, address: str, handler: LinkHandler) -> Endpoint:
        socket = self._make_socket(zmq.DEALER, address)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise LinkError(f"cannot dial {address}: {error}") from error
        return self._adopt(_Dialled(self, socket, monitor, handler, address))

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        self.call(lambda: self._timers.append(_Timer(time.monotonic() + seconds, seconds, callback)))

    def close(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self.call(lambda: None)
        self._thread.join(CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            logger.error("link thread did not stop within %.0f s", CLOSE_TIMEOUT_SECONDS)
            return
        with self._wake_lock:
            self._wake_sender.close(0)
        self._wake_receiver.close(0)
        self._context.term()

    def call(self, command: Callable[[], None]) -> None:
        """Runs `command` in the link's thread, soon and in order. Does nothing once the links are closed."""
        self._commands.append(command)
        with self._wake_lock, contextlib.suppress(zmq.Again):
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def register(self, socket: "zmq.Socket[bytes]", on_readable: Callable[[], None]) -> None:
        self._ready[socket] = on_readable
        self._poller.register(socket, zmq.POLLIN)

    def forget(self, socket: "zmq.Socket[bytes]") -> None:
        self._ready.pop(socket, None)
        if socket in self._poller:
            self._poller.unregister(socket)

    def _make_socket(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        # Bytes in flight are bounded by the transfer's own credit; a high-water mark would drop or block instead.
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def _adopt(self, endpoint: "_ZmqEndpoint") -> "_ZmqEndpoint":
        self._endpoints.append(endpoint)
        self.call(endpoint.attach)
        return endpoint

    def _run(self) -> None:
        while not self._stopping:
            for socket, _ in self._poller.poll(self._poll_ms()):
                if socket is self._wake_receiver:
                    self._drain_wakes()
                elif socket in self._ready:
                    self._ready[socket]()
            self._run_commands()
            self._run_timers()
        self._run_commands()
        for endpoint in self._endpoints:
            endpoint.detach()

    def _poll_ms(self) -> int | None:
        if not self._timers:
            return None
        due = min(timer.due for timer in self._timers)
        return max(0, math.ceil((due - time.monotonic()) * 1000))

    def _run_timers(self) -> None:
        now = time.monotonic()
        for timer in self._timers:
            if timer.due <= now:
                timer.due = now + timer.seconds
                timer.callback()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._wake_receiver.recv(zmq.NOBLOCK)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()


class _ZmqEndpoint(Endpoint):
    def __init__(self, links: ZmqLinks, socket: "zmq.Socket[bytes]", handler: LinkHandler, address: str) -> None:
        self._links = links
        self._socket = socket
        self._handler = handler
        self._closed = threading.Event()
        self.address = address

    def send(self, frames: Sequence[Frame], peer: bytes = b"") -> None:
        self._links.call(lambda: self._send_now(frames, peer))

    def close(self) -> None:
        self._links.call(self.detach)
        self._closed.wait(CLOSE_TIMEOUT_SECONDS)

    def attach(self) -> None:
        self._links.register(self._socket, self._receive_ready)

    def detach(self) -> None:
        if not self._closed.is_set():
            self._links.forget(self._socket)
            self._socket.close()
            self._closed.set()

    def _receive_ready(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._deliver([frame.buffer for frame in frames])

    def _deliver(self, frames: list[memoryview]) -> None:
        raise NotImplementedError

    def _send_now(self, frames: Sequence[Frame], peer: bytes) -> None:
        raise NotImplementedError


class _Listener(_ZmqEndpoint):
    def __init__(self, links: ZmqLinks, socket: "zmq.Socket[bytes]", handler: LinkHandler) -> None:
        super().__init__(links, socket, handler, socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _deliver(self, frames: list[memoryview]) -> None:
        self._handler.on_message(bytes(frames[0]), frames[1:])

    def _send_now(self, frames: Sequence[Frame], peer: bytes) -> None:
        if self._closed.is_set():
            return
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=_is_small(frames))
        except zmq.ZMQError as error:
            logger.debug("cannot send to %r: %s", peer, error)
            self._handler.on_down(peer)


class _Dialled(_ZmqEndpoint):
    def __init__(
        self,
        links: ZmqLinks,
        socket: "zmq.Socket[bytes]",
        monitor: "zmq.Socket[bytes]",
        handler: LinkHandler,
        address: str,
    ) -> None:
        super().__init__(links, socket, handler, address)
        self._monitor = monitor

    def attach(self) -> None:
        super().attach()
        self._links.register(self._monitor, self._monitor_ready)

    def detach(self) -> None:
        if not self._closed.is_set():
            self._links.forget(self._monitor)
            self._socket.disable_monitor()
            self._monitor.close(0)
        super().detach()

    def _monitor_ready(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._handler.on_up(b"")
                elif event == zmq.EVENT_DISCONNECTED:
                    # Units that arrived before the connection broke are still in the socket: deliver them first.
                    self._receive_ready()
                    self._handler.on_down(b"")

    def _deliver(self, frames: list[memoryview]) -> None:
        self._handler.on_message(b"", frames)

    def _send_now(self, frames: Sequence[Frame], peer: bytes) -> None:
        if self._closed.is_set():
            return
        try:
            self._socket.send_multipart(list(frames), zmq.NOBLOCK, copy=_is_small(frames))
        except zmq.ZMQError as error:
            logger.debug("cannot send to %s: %s", self.address, error)
            self._handler.on_down(b"")


def _is_small(frames: Sequence[Frame]) -> bool:
    return sum(len(frame) for frame in frames) < ZERO_COPY_MIN_BYTES
