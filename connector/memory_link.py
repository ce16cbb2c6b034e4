"""Links without sockets or threads, for unit tests: messages lie in one queue until the test pumps it."""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connector.link import Endpoint, Frame, LinkHandler, Links
from engine.errors import LinkError


@dataclass(slots=True)
class _Delivery:
    target: "_MemoryEndpoint"
    peer: bytes
    frames: list[memoryview]


@dataclass(slots=True)
class MemoryNetwork:
    """Joins the `MemoryLinks` of several nodes. `tamper` may drop (return []), duplicate or change deliveries."""

    listeners: dict[str, "_MemoryEndpoint"] = field(default_factory=dict)
    messages: "queue.SimpleQueue[_Delivery]" = field(default_factory=queue.SimpleQueue)
    tamper: Callable[[list[memoryview]], list[list[memoryview]]] = field(default=lambda frames: [frames])
    num_dialled: int = 0

    def pump(self) -> int:
        """Delivers until nothing is queued; returns how many messages it delivered."""
        num_delivered = 0
        while not self.messages.empty():
            self._deliver(self.messages.get())
            num_delivered += 1
        return num_delivered

    def pump_until(self, holds: Callable[[], bool], timeout: float = 10.0) -> None:
        """Delivers, waiting for messages that other threads send, until `holds()`. `TimeoutError` without traffic."""
        while not holds():
            try:
                self._deliver(self.messages.get(timeout=timeout))
            except queue.Empty:
                raise TimeoutError(f"no message for {timeout} s") from None

    def _deliver(self, delivery: _Delivery) -> None:
        if not delivery.target.closed:
            for frames in self.tamper(delivery.frames):
                delivery.target.handler.on_message(delivery.peer, frames)


class MemoryLinks(Links):
    """One node's ends. Timers fire when the test calls `tick`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._endpoints: list[_MemoryEndpoint] = []
        self._timers: list[Callable[[], None]] = []

    def listen(self, address: str, handler: LinkHandler) -> Endpoint:
        if address in self._network.listeners:
            raise LinkError(f"cannot listen on {address}: in use")
        endpoint = _MemoryEndpoint(self._network, handler, address)
        self._network.listeners[address] = endpoint
        self._endpoints.append(endpoint)
        return endpoint

    def dial(self, address: str, handler: LinkHandler) -> Endpoint:
        listener = self._network.listeners.get(address)
        if listener is None:
            raise LinkError(f"nobody listens on {address}")
        self._network.num_dialled += 1
        endpoint = _MemoryEndpoint(self._network, handler, address)
        endpoint.join(listener, b"peer-%d" % self._network.num_dialled)
        self._endpoints.append(endpoint)
        handler.on_up(b"")
        return endpoint

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timers.append(callback)

    def tick(self) -> None:
        for callback in self._timers:
            callback()

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


class _MemoryEndpoint(Endpoint):
    def __init__(self, network: MemoryNetwork, handler: LinkHandler, address: str) -> None:
        self._network = network
        self._others: dict[bytes, _MemoryEndpoint] = {}
        self._own_name = b""
        self.handler = handler
        self.address = address
        self.closed = False

    def join(self, listener: "_MemoryEndpoint", own_name: bytes) -> None:
        self._own_name = own_name
        self._others[b""] = listener
        listener._others[own_name] = self

    def send(self, frames: Sequence[Frame], peer: bytes = b"") -> None:
        other = self._others.get(peer)
        if other is None or other.closed:
            self.handler.on_down(peer)
            return
        copies = [memoryview(bytearray(frame)) for frame in frames]
        self._network.messages.put(_Delivery(other, self._own_name, copies))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._own_name:
            self._network.listeners.pop(self.address, None)
        for name, other in self._others.items():
            if name == b"" and not other.closed:
                other._others.pop(self._own_name, None)
            elif not other.closed:
                other.handler.on_down(b"")
