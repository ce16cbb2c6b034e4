"""A decode node's view of one prefill node: handshake, heartbeat, and whether it is there.

CONNECTING --welcome--> READY --connection lost, silence, new epoch--> LOST --welcome--> READY
     |                                                                  ^
     +--refused--> REFUSED  (asked again at every heartbeat: the other end may be restarted with the right model)
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from connector.codec import encode
from connector.link import Endpoint, Links
from connector.peer_messages import (
    ExpressHello,
    FirstToken,
    FromDecode,
    FromPrefill,
    PeerGoodbye,
    PeerHello,
    PeerPing,
    PeerPong,
    PeerRefused,
    PeerWelcome,
    Transport,
    decode_from_prefill_node,
)
from connector.shared_kv import PeerProcess
from engine.errors import ErrorKind, LinkError, MalformedMessage

logger = logging.getLogger(__name__)

GOODBYE = "it is shutting down"


class PeerState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"


class PeerOwner(Protocol):
    """Who is told what a peer does. Called in the link's thread."""

    def peer_message(self, peer: "PrefillPeer", message: FromPrefill, frames: Sequence[memoryview]) -> None: ...

    def peer_first_token(self, peer: "PrefillPeer", message: FirstToken) -> None:
        """A copy, which may be early or late."""

    def peer_lost(self, peer: "PrefillPeer", kind: ErrorKind, reason: str) -> None: ...

    def peer_changed(self) -> None: ...


class PrefillPeer:
    """One dialled prefill node. Implements `LinkHandler`."""

    def __init__(
        self, address: str, hello: PeerHello, peer_timeout: float, owner: PeerOwner, clock: Callable[[], float]
    ) -> None:
        self.address = address
        self.name = address
        self.epoch = ""
        self.transport: Transport = "zmq"
        self.process: PeerProcess | None = None
        self.state = PeerState.CONNECTING
        self.reason = "no answer yet"
        self.engine_progress_at = 0.0
        self.num_malformed = 0
        self._num_steps = -1
        self._hello = hello
        self._peer_timeout = peer_timeout
        self._owner = owner
        self._clock = clock
        self._endpoint: Endpoint | None = None
        self._express = _Express(self)
        self._last_heard = self._clock()
        self._sequence = 0

    def dial(self, links: Links) -> None:
        self._endpoint = links.dial(self.address, self)
        self._express.dial(links)
        # The connection may stand before `dial` returned, when `on_up` had no endpoint yet. Hellos may be repeated.
        self.send(self._hello)

    def send(self, message: FromDecode) -> None:
        if self._endpoint is not None:
            self._endpoint.send([encode(message)])

    def on_up(self, peer: bytes) -> None:
        self.send(self._hello)

    def express_up(self) -> None:
        if self.state is PeerState.READY:
            self._express.join(self._hello.epoch)

    def on_down(self, peer: bytes) -> None:
        self._lose(ErrorKind.PEER_UNREACHABLE, "connection lost")

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        message = self._decode(frames)
        if message is None:
            return
        self._last_heard = self._clock()
        match message:
            case PeerWelcome():
                self._welcomed(message)
            case PeerRefused():
                self._refused(message.reason)
            case PeerPong():
                self._pong(message)
            case PeerGoodbye():
                self._lose(ErrorKind.PEER_UNREACHABLE, GOODBYE, level=logging.INFO)
        self._owner.peer_message(self, message, frames)

    def on_express(self, frames: Sequence[memoryview]) -> None:
        """No sign of life: the connection that carries the KV may be dead."""
        message = self._decode(frames)
        if isinstance(message, FirstToken):
            self._owner.peer_first_token(self, message)

    def _decode(self, frames: Sequence[memoryview]) -> FromPrefill | None:
        try:
            return decode_from_prefill_node.decode(frames[0])
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.warning("dropped a message from prefill node %s: %s", self.name, str(error))
            return None

    def tick(self, open_transfer_ids: list[str], awaited_lease_ids: list[str]) -> None:
        """One heartbeat, with all that is wanted from this peer at this moment."""
        silence = self._clock() - self._last_heard
        if self.state is PeerState.READY and silence > self._peer_timeout:
            self._lose(ErrorKind.PEER_UNREACHABLE, f"silent for {silence:.1f} s")
        if self.state is not PeerState.READY:
            self.send(self._hello)
        self._sequence += 1
        self.send(PeerPing(sequence=self._sequence, transfer_ids=open_transfer_ids, lease_ids=awaited_lease_ids))

    def close(self) -> None:
        self.send(PeerGoodbye())
        if self.process is not None:
            self.process.close()

    def _welcomed(self, welcome: PeerWelcome) -> None:
        if self.state is PeerState.READY and welcome.epoch != self.epoch:
            self._lose(ErrorKind.PEER_UNREACHABLE, "it was restarted")
        if welcome.epoch != self.epoch:
            self._watch_process(welcome)
        self.name, self.epoch, self.transport = welcome.name, welcome.epoch, welcome.transport
        if self.state is not PeerState.READY:
            logger.info("prefill node %s at %s is ready, KV over %s", self.name, self.address, self.transport)
        self.state, self.reason, self._num_steps = PeerState.READY, "", -1
        self._express.join(self._hello.epoch)
        self._owner.peer_changed()

    def _watch_process(self, welcome: PeerWelcome) -> None:
        """Only a writer into shared memory needs watching. The old process is watched by whoever still waits for it."""
        self.process = None
        if welcome.transport == "shm":
            try:
                self.process = PeerProcess(welcome.pid)
            except LinkError as error:
                logger.warning("prefill node %s: %s", welcome.name, error)

    def _refused(self, reason: str) -> None:
        if self.state is not PeerState.REFUSED or self.reason != reason:
            logger.error("prefill node at %s refuses us: %s", self.address, reason)
        if self.state is PeerState.READY:
            self._lose(ErrorKind.PEER_UNREACHABLE, reason)
        self.state, self.reason = PeerState.REFUSED, reason
        self._owner.peer_changed()

    def _pong(self, pong: PeerPong) -> None:
        if pong.num_steps != self._num_steps:
            self._num_steps = pong.num_steps
            self.engine_progress_at = self._clock()

    def _lose(self, kind: ErrorKind, reason: str, *, level: int = logging.WARNING) -> None:
        if self.state is not PeerState.READY:
            return
        logger.log(level, "lost prefill node %s at %s: %s", self.name, self.address, reason)
        self.state, self.reason = PeerState.LOST, reason
        self._owner.peer_lost(self, kind, reason)
        self._owner.peer_changed()


class _Express:
    """The second connection to the same node. What comes over it comes over the first, too, in its order; so nothing
    depends on it. Implements `LinkHandler`."""

    def __init__(self, peer: PrefillPeer) -> None:
        self._peer = peer
        self._endpoint: Endpoint | None = None

    def dial(self, links: Links) -> None:
        self._endpoint = links.dial(self._peer.address, self)

    def join(self, epoch: str) -> None:
        """May be repeated."""
        if self._endpoint is not None:
            self._endpoint.send([encode(ExpressHello(epoch=epoch))])

    def on_up(self, peer: bytes) -> None:
        self._peer.express_up()

    def on_down(self, peer: bytes) -> None:
        pass

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        self._peer.on_express(frames)
