"""A TCP relay between two nodes: throttles, swallows, cuts. One thread for each direction of each connection."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK = 1 << 14
BURST_SECONDS = 0.01
"""How much of a late wake-up is made up for, so that the rate is kept on average."""


class Relay:
    """Listens on a free port; `target` may be set after the start.

    What flows back from the target to the one that dialled is the way KV goes: `bytes_per_second` bounds it, and the
    connections are cut once `cut_after` bytes of it went through, in the middle of a frame or not.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.target = ""
        self.swallow = False
        self.num_bytes_back = 0
        self.bytes_per_second = bytes_per_second
        self.cut_after: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._due = 0.0
        self._start(self._accept)

    def cut(self) -> None:
        """Ends the connections there are; new ones are accepted."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for connection in self._sockets:
            connection.close()

    def _start(self, work, *args) -> None:
        thread = threading.Thread(target=work, args=args, name="relay")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if not self.target:
                    continue  # a black hole
            except OSError:
                continue
            try:
                host, port = self.target.removeprefix("tcp://").rsplit(":", 1)
                far = socket.create_connection((host, int(port)), timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()  # nobody there yet: the one who dialled shall dial again
                continue
            self._sockets.append(far)
            self._start(self._pump, near, far, False)
            self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if self.swallow:
                    continue
                sink.sendall(self._slowed(data) if is_back else data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _slowed(self, data: bytes) -> bytes:
        """What of `data` may go on, when it may."""
        if self.bytes_per_second is not None:
            now = time.monotonic()
            self._due = max(self._due, now - BURST_SECONDS) + len(data) / self.bytes_per_second
            self._closed.wait(self._due - now)
        if self.cut_after is not None and self.num_bytes_back + len(data) >= self.cut_after:
            data = data[: max(0, self.cut_after - self.num_bytes_back)]
            self.cut_after = None
            self.cut()
        self.num_bytes_back += len(data)
        return data


@contextmanager
def running_relay(bytes_per_second: float | None = None) -> Iterator[Relay]:
    relay = Relay(bytes_per_second)
    try:
        yield relay
    finally:
        relay.close()
