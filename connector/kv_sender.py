"""The prefill node's end of KV transfer.

  Prefill (grant) --> on_grant: a request for the engine
  save()  x layers x chunks --> Unit ...              while later layers compute
  finish() -------------------> FirstToken, PrefillDone -+
  fail() ---------------------> TransferFailed ----------+-->  the request id comes out of `take_closed`
  CancelTransfer, peer lost --> TransferClosed ----------+     once nothing reads its blocks any more

The engine's request for a grant is named by the transfer id, which is unique over all nodes and restarts.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from connector import failpoints
from connector.codec import PROTOCOL_VERSION, encode
from connector.decode_peer import DecodePeer, OutgoingTransfer, SenderCounters, Shipping
from connector.identity import NodeIdentity
from connector.kv_unit import unit_spans
from connector.leases import LeaseError, LeaseTable
from connector.link import Endpoint, Frame, Links
from connector.peer_messages import (
    CancelTransfer,
    Credit,
    ExpressHello,
    FirstToken,
    FromDecode,
    PeerGoodbye,
    PeerHello,
    PeerPing,
    PeerPong,
    PeerRefused,
    PeerWelcome,
    Prefill,
    PrefillDone,
    PromptPiece,
    Pull,
    ReleaseLease,
    TransferFailed,
    decode_from_decode_node,
)
from connector.shared_kv import PeerKVMemory
from connector.transfer_settings import TransferSettings
from engine.errors import ErrorKind, LinkError, MalformedMessage
from engine.prompt_logprobs import PromptLogprobs
from engine.request import SampledToken

logger = logging.getLogger(__name__)

_FAILPOINTS: dict[type[FromDecode], str] = {Prefill: "prefill.on_grant", CancelTransfer: "prefill.on_cancel"}


class GrantTaker(Protocol):
    """The engine's loop, as the sender sees it. Called in the link's thread; must not block."""

    def take_grant(self, grant: Prefill) -> None:
        """A decode node wants this prompt computed. The request is to be named by the transfer id."""

    def abort(self, request_id: str) -> None:
        """Nobody wants the request any more."""

    def wake(self) -> None:
        """Something came in that a step would report."""


class KVSender:
    """Answers decode nodes, ships units. Implements `LinkHandler`.

    The peer table is changed by the link's thread only; the engine's thread reads it.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        settings: TransferSettings,
        taker: GrantTaker,
        leases: LeaseTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SenderCounters()
        self.num_malformed = 0
        self.num_refused = 0
        self.num_steps = 0
        self._refused: dict[str, str] = {}
        self._identity = identity
        self._settings = settings
        self._taker = taker
        self._leases = leases
        self._clock = clock
        self._kv_caches: Sequence[torch.Tensor] = ()
        self._endpoint: Endpoint | None = None
        self._peers: dict[bytes, DecodePeer] = {}
        self._closed: set[str] = set()
        self._closed_lock = threading.Lock()

    def listen(self, links: Links, address: str) -> str:
        """Returns the address with its real port. Nobody is answered before `start`: decode nodes ask again."""
        self._endpoint = links.listen(address, self)
        links.every(self._settings.heartbeat_interval, self.tick)
        return self._endpoint.address

    def start(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def close(self) -> None:
        self._kv_caches = ()  # nobody is welcomed any more
        for identity in list(self._peers):
            self._send(identity, PeerGoodbye())
        peers = list(self._peers.values())  # the link's thread may still lose some
        for peer in peers:
            peer.lose()
        for peer in peers:
            peer.join()

    # The engine's side

    def save(self, request_id: str, layer: int, span: range, block_ids: Sequence[int]) -> None:
        """Ships the positions of `span` of `layer`, which are complete in our blocks `block_ids`."""
        if (found := self._find(request_id)) is not None:
            peer, transfer = found
            if layer == len(self._kv_caches) - 1:
                transfer.computed_at = self._clock()
            peer.save(transfer, layer, span, block_ids)

    def finish(
        self,
        request_id: str,
        first_token: SampledToken | None,
        num_cached_tokens: int,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        if (found := self._find(request_id)) is not None:
            peer, transfer = found
            epoch = self._identity.epoch
            for piece in prompt_logprobs:
                if not (failpoints.armed and failpoints.hit("prefill.before_prompt_piece")):
                    peer.say(PromptPiece(transfer_id=request_id, epoch=epoch, logprobs=piece))
            if not (failpoints.armed and failpoints.hit("prefill.before_first_token")):
                # A first token must not overtake the pieces of what belongs before it.
                say = peer.say if prompt_logprobs else peer.say_twice
                say(
                    FirstToken(
                        transfer_id=request_id, epoch=epoch, token=first_token, num_cached_tokens=num_cached_tokens
                    )
                )
            peer.end(transfer, PrefillDone(transfer_id=request_id, epoch=epoch, computed_at=transfer.computed_at))
        else:
            self._close(request_id)

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        if (found := self._find(request_id)) is not None:
            peer, transfer = found
            epoch = self._identity.epoch
            peer.end(transfer, TransferFailed(transfer_id=request_id, epoch=epoch, kind=kind, reason=reason))
        else:
            self._close(request_id)

    def take_closed(self) -> frozenset[str]:
        with self._closed_lock:
            closed, self._closed = self._closed, set()
            return frozenset(closed)

    def open_transfer_ids(self) -> list[str]:
        return [name for peer in list(self._peers.values()) for name in list(peer.transfers)]

    @property
    def peer_names(self) -> list[str]:
        return [peer.name for peer in list(self._peers.values())]

    @property
    def num_express(self) -> int:
        """Peers whose second connection stands."""
        return sum(peer.express is not None for peer in list(self._peers.values()))

    # The link's side

    def on_up(self, peer: bytes) -> None:
        pass

    def on_down(self, peer: bytes) -> None:
        self._lose(peer, "its connection is gone")
        for decode_peer in self._peers.values():
            decode_peer.lose_express(peer)

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        try:
            message = decode_from_decode_node.decode(frames[0] if frames else b"")
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.warning("dropped a message on the KV link: %s", str(error))
            return
        if isinstance(message, PeerHello):
            if self._kv_caches:
                self._on_hello(peer, message)
        elif isinstance(message, ExpressHello):
            self._on_express_hello(peer, message)
        elif peer in self._peers:
            self._peers[peer].last_heard = self._clock()
            self._on_peer_message(peer, self._peers[peer], message)

    def tick(self) -> None:
        self._leases.expire()
        if self._leases.has_news():
            self._taker.wake()
        now = self._clock()
        for identity, peer in list(self._peers.items()):
            if now - peer.last_heard > self._settings.peer_timeout:
                self._lose(identity, f"silent for {now - peer.last_heard:.1f} s")

    def _on_hello(self, identity: bytes, hello: PeerHello) -> None:
        reason = self._why_refuse(hello)
        if reason is not None:
            self._refuse(identity, hello, reason)
            return
        for other, peer in list(self._peers.items()):
            if peer.epoch == hello.epoch and other != identity:
                self._lose(other, "it dialled again")
        if identity not in self._peers and not self._admit(identity, hello):
            return
        welcome = PeerWelcome(
            name=self._identity.name,
            epoch=self._identity.epoch,
            transport=self._peers[identity].transport,
            pid=self._identity.pid,
        )
        self._send(identity, welcome)

    def _on_express_hello(self, identity: bytes, hello: ExpressHello) -> None:
        for peer in self._peers.values():
            if peer.epoch == hello.epoch:
                peer.express = identity

    def _why_refuse(self, hello: PeerHello) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol_version}, this node speaks {PROTOCOL_VERSION}"
        if len(self._peers) >= self._settings.max_peers:
            return f"--max-peers is {self._settings.max_peers}"
        return self._identity.model.mismatch(hello.model)

    def _refuse(self, identity: bytes, hello: PeerHello, reason: str) -> None:
        self.num_refused += 1
        if self._refused.get(hello.epoch) != reason:
            # It asks again with every heartbeat.
            self._refused = {hello.epoch: reason}
            logger.error("refused decode node %s: %s", hello.name, reason)
        self._send(identity, PeerRefused(reason=reason))

    def _admit(self, identity: bytes, hello: PeerHello) -> bool:
        memory = None
        if self._settings.transport != "zmq":
            memory = open_peer_memory(hello, self._kv_caches)
            if memory is None and self._settings.transport == "shm":
                self._refuse(identity, hello, "--transport is shm, and its KV memory is not reachable from here")
                return False
        logger.info("decode node %s joined, KV over %s", hello.name, "zmq" if memory is None else "shm")
        self._peers[identity] = DecodePeer(
            hello,
            memory,
            self._kv_caches,
            shipping=Shipping(
                epoch=self._identity.epoch,
                send=lambda frames: self._send_frames(identity, frames),
                send_by_express=lambda express, frames: self._send_frames(express, frames),
                on_closed=self._on_closed,
                counters=self.counters,
                leases=self._leases,
                clock=self._clock,
            ),
        )
        return True

    def _on_peer_message(self, identity: bytes, peer: DecodePeer, message: FromDecode) -> None:
        if failpoints.armed and failpoints.hit(_FAILPOINTS.get(type(message), "")):
            return
        match message:
            case Prefill():
                peer.open(message)
                self._taker.take_grant(message)
            case Pull():
                self._on_pull(peer, message)
            case ReleaseLease(lease_id=lease_id):
                self.release_lease(lease_id)
            case CancelTransfer(transfer_id=transfer_id):
                self._cancel(peer, transfer_id)
            case Credit(num_bytes=num_bytes):
                peer.credit(num_bytes)
            case PeerGoodbye():
                self._lose(identity, "it is shutting down", level=logging.INFO)
            case PeerPing():
                self._leases.renew(message.lease_ids)
                # A cancel may have been lost with a connection: what is not asked for any more is cancelled, too.
                for transfer_id in set(peer.transfers) - set(message.transfer_ids):
                    self._cancel(peer, transfer_id)
                unknown = [name for name in message.transfer_ids if name not in peer.transfers]
                pong = PeerPong(sequence=message.sequence, num_steps=self.num_steps, unknown_transfer_ids=unknown)
                self._send(identity, pong)
            case _:
                raise AssertionError(f"unhandled message {message!r}")

    def release_lease(self, lease_id: str) -> None:
        """Nobody will come for it. Unknown ids are passed over."""
        self._leases.release(lease_id)
        self._taker.wake()

    def _on_pull(self, peer: DecodePeer, pull: Pull) -> None:
        epoch = self._identity.epoch
        try:
            lease = self._leases.start_read(pull.lease_id, pull.end, pull.digest)
        except LeaseError as error:
            kind = ErrorKind.KV_LOAD_FAILED
            peer.say(TransferFailed(transfer_id=pull.transfer_id, epoch=epoch, kind=kind, reason=str(error)))
            return
        transfer = peer.open(pull, lease)
        for layer, kv_cache in enumerate(self._kv_caches):
            for span in unit_spans(kv_cache, pull.start, pull.end):
                peer.save(transfer, layer, span, lease.block_ids)
        peer.end(transfer, PrefillDone(transfer_id=pull.transfer_id, epoch=epoch, computed_at=self._clock()))

    def _cancel(self, peer: DecodePeer, transfer_id: str) -> None:
        transfer = peer.transfers.get(transfer_id)
        if transfer is None:
            peer.refuse(transfer_id)
            return
        peer.cancel(transfer)
        self._taker.abort(transfer_id)

    def _lose(self, identity: bytes, reason: str, *, level: int = logging.WARNING) -> None:
        peer = self._peers.pop(identity, None)
        if peer is None:
            return
        logger.log(level, "lost decode node %s: %s", peer.name, reason)
        transfer_ids = list(peer.transfers)
        peer.lose()
        for transfer_id in transfer_ids:
            self._taker.abort(transfer_id)

    def _find(self, request_id: str) -> tuple[DecodePeer, OutgoingTransfer] | None:
        for peer in list(self._peers.values()):
            if (transfer := peer.transfers.get(request_id)) is not None:
                return peer, transfer
        return None

    def _on_closed(self, transfer: OutgoingTransfer) -> None:
        if transfer.lease is None:
            self._close(transfer.transfer_id)
        else:
            # No request of the engine's stands behind a read; its lease tells which blocks are free.
            self._taker.wake()

    def _close(self, request_id: str) -> None:
        with self._closed_lock:
            self._closed.add(request_id)
        self._taker.wake()

    def _send(self, identity: bytes, message: PeerWelcome | PeerRefused | PeerPong | PeerGoodbye) -> None:
        self._send_frames(identity, [encode(message)])

    def _send_frames(self, identity: bytes, frames: Sequence[Frame]) -> None:
        if self._endpoint is not None:
            self._endpoint.send(frames, identity)


def open_peer_memory(hello: PeerHello, kv_caches: Sequence[torch.Tensor]) -> PeerKVMemory | None:
    """The peer's memory if it offers some and it can be reached from here."""
    if hello.shared_memory is None:
        return None
    try:
        return PeerKVMemory(hello.shared_memory, kv_caches)
    except LinkError as error:
        logger.info("decode node %s gets its KV by message: %s", hello.name, error)
        return None
