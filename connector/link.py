"""A link carries whole messages (lists of frames) between a listener and the peers that dial it.

Abstraction only: `zmq_link` is the real one, `memory_link` the one that unit tests drive by hand.
Handlers run in the link's own thread and must not block; `send` may be called from any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

Frame = bytes | memoryview


class LinkHandler(Protocol):
    """Who gets what arrives at one endpoint. `peer` names the other end (at a dialled endpoint it is always b"")."""

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        """One whole message. The frames are valid only during the call unless copied."""

    def on_up(self, peer: bytes) -> None:
        """Dialled endpoints only: the connection stands (again)."""

    def on_down(self, peer: bytes) -> None:
        """The connection was lost, or a message could not be delivered to `peer`."""


class Endpoint(ABC):
    """One listening or dialled end."""

    address: str
    """Where it listens, with the port that was really bound, or what it dialled."""

    @abstractmethod
    def send(self, frames: Sequence[Frame], peer: bytes = b"") -> None:
        """Queues one message; never blocks. Buffers must not change afterwards. A lost peer is told to `on_down`."""

    @abstractmethod
    def close(self) -> None:
        """No more messages after this returns."""


class Links(ABC):
    """A thread (or a test) that owns endpoints."""

    @abstractmethod
    def listen(self, address: str, handler: LinkHandler) -> Endpoint:
        """Raises `LinkError` naming the address if it cannot be bound. Port 0 picks a free one."""

    @abstractmethod
    def dial(self, address: str, handler: LinkHandler) -> Endpoint:
        """Returns at once; connects and reconnects in the background."""

    @abstractmethod
    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in the link's thread about every `seconds`, until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Closes every endpoint and joins the thread, within a deadline."""
