"""A prefill node's view of one decode node that dialled it, and the thread that ships KV to it.

One thread for each decode node, so that a slow one delays only itself. That thread alone reads blocks for the peer, and
whatever ends a transfer passes through its queue: after the end nothing of the transfer is read, written or sent.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from connector import failpoints
from connector.codec import encode
from connector.kv_unit import copy_unit, gather_unit, unit_num_bytes
from connector.leases import Lease, LeaseError, LeaseTable
from connector.link import Frame
from connector.peer_messages import (
    FirstToken,
    FromPrefill,
    PeerHello,
    Prefill,
    PrefillDone,
    Pull,
    TransferClosed,
    TransferFailed,
    Transport,
    Unit,
)
from connector.shared_kv import PeerKVMemory
from engine.errors import ErrorKind

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_SECONDS = 5.0


@dataclass(slots=True)
class SenderCounters:
    """Only ever grow."""

    num_bytes: int = 0
    num_units: int = 0
    num_transfers_sent: int = 0
    num_transfers_closed: int = 0
    seconds_waiting_for_credit: float = 0.0


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One grant that we serve."""

    transfer_id: str
    block_ids: Sequence[int]
    """The decode node's blocks."""
    start: int
    end: int
    is_cancelled: bool = False
    lease: Lease | None = None
    """What is read, where that is held KV and not a running request's."""
    computed_at: float = 0.0
    """When the last layer of the prompt was saved."""


@dataclass(frozen=True, slots=True)
class _SendUnit:
    transfer: OutgoingTransfer
    layer: int
    span: range
    block_ids: Sequence[int]
    saved_at: float


@dataclass(frozen=True, slots=True)
class _End:
    transfer: OutgoingTransfer
    message: FromPrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipping:
    """What a peer's thread needs of its sender."""

    epoch: str
    send: Callable[[Sequence[Frame]], None]
    send_by_express: Callable[[bytes, Sequence[Frame]], None]
    """Over another connection, named first."""
    on_closed: Callable[[OutgoingTransfer], None]
    """Told each transfer that is over; called in the peer's thread."""
    counters: SenderCounters
    leases: LeaseTable
    clock: Callable[[], float]


class DecodePeer:
    """One decode node that dialled us, and the thread that ships KV to it."""

    def __init__(
        self,
        hello: PeerHello,
        memory: PeerKVMemory | None,
        kv_caches: Sequence[torch.Tensor],
        shipping: Shipping,
    ) -> None:
        self.name = hello.name
        self.epoch = hello.epoch
        self.last_heard = shipping.clock()
        self.transfers: dict[str, OutgoingTransfer] = {}
        self.express: bytes | None = None
        """The connection for what must not wait behind KV, once it stands."""
        self._memory = memory
        self._kv_caches = kv_caches
        self._own_epoch = shipping.epoch
        self._send = shipping.send
        self._send_by_express = shipping.send_by_express
        self._on_closed = shipping.on_closed
        self._counters = shipping.counters
        self._leases = shipping.leases
        self._clock = shipping.clock
        self._credit_bytes = hello.credit_bytes
        self._wants_digests = hello.wants_digests
        self._in_flight = 0
        self._changed = threading.Condition()
        self._is_lost = False
        self._queue: queue.SimpleQueue[_SendUnit | _End | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{hello.name}", daemon=True)
        self._thread.start()

    @property
    def transport(self) -> Transport:
        return "zmq" if self._memory is None else "shm"

    # Called by the engine's and the link's thread

    def open(self, order: Prefill | Pull, lease: Lease | None = None) -> OutgoingTransfer:
        transfer = OutgoingTransfer(order.transfer_id, order.block_ids, order.start, order.end, lease=lease)
        self.transfers[order.transfer_id] = transfer
        return transfer

    def save(self, transfer: OutgoingTransfer, layer: int, span: range, block_ids: Sequence[int]) -> None:
        self._queue.put(_SendUnit(transfer, layer, span, block_ids, self._clock()))

    def say(self, message: FromPrefill) -> None:
        """At once, ahead of units that wait in the queue."""
        self._send([encode(message)])

    def say_twice(self, message: FirstToken) -> None:
        """In its order, and, where the second connection stands, ahead of KV that is under way."""
        if (express := self.express) is not None:
            self._send_by_express(express, [encode(message)])
        self.say(message)

    def lose_express(self, express: bytes) -> None:
        """Does nothing if it is not ours."""
        if self.express == express:
            self.express = None

    def end(self, transfer: OutgoingTransfer, message: FromPrefill) -> None:
        """`message` follows the last unit; after it nothing of the transfer is read or sent."""
        self._queue.put(_End(transfer, message))

    def cancel(self, transfer: OutgoingTransfer) -> None:
        with self._changed:
            transfer.is_cancelled = True
            self._changed.notify_all()
        self.end(transfer, TransferClosed(transfer_id=transfer.transfer_id, epoch=self._own_epoch))

    def refuse(self, transfer_id: str) -> None:
        """Answers for a transfer that we do not know: nothing of it will come."""
        self.say(TransferClosed(transfer_id=transfer_id, epoch=self._own_epoch))

    def credit(self, num_bytes: int) -> None:
        with self._changed:
            self._in_flight = max(0, self._in_flight - num_bytes)
            self._changed.notify_all()

    def lose(self) -> None:
        """The peer is gone: ends everything that was for it."""
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()
        for transfer in list(self.transfers.values()):
            self.cancel(transfer)
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(JOIN_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            logger.error("the thread that ships KV to %s did not stop", self.name)

    # The peer's thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _SendUnit():
                    self._ship(item)
                case _End():
                    self._finish(item)

    def _ship(self, item: _SendUnit) -> None:
        num_bytes = unit_num_bytes(self._kv_caches[item.layer], item.span.start, item.span.stop)
        if item.transfer.is_cancelled or not (self._memory or self._wait_for_credit(item.transfer, num_bytes)):
            return
        if failpoints.armed and failpoints.hit(f"prefill.before_send.layer{item.layer}"):
            self.credit(num_bytes)
            return
        if self._memory is not None:
            self._ship_by_memory(item, self._memory, num_bytes)
        else:
            self._ship_by_message(item, num_bytes)
        if failpoints.armed:
            failpoints.hit(f"prefill.after_send.layer{item.layer}")

    def _ship_by_memory(self, item: _SendUnit, memory: PeerKVMemory, num_bytes: int) -> None:
        transfer = item.transfer
        source, target = self._kv_caches[item.layer], memory.kv_caches[item.layer]
        copy_unit(source, item.block_ids, target, transfer.block_ids, item.span)
        self._send_unit(item, num_bytes, b"", [])

    def _ship_by_message(self, item: _SendUnit, num_bytes: int) -> None:
        payload = gather_unit(self._kv_caches[item.layer], item.block_ids, item.span.start, item.span.stop)
        data = memoryview(payload.numpy())  # type: ignore[arg-type]
        self._send_unit(item, num_bytes, xxhash.xxh3_64_digest(data) if self._wants_digests else b"", [data])

    def _send_unit(self, item: _SendUnit, num_bytes: int, digest: bytes, payload: list[memoryview]) -> None:
        header = Unit(
            transfer_id=item.transfer.transfer_id,
            epoch=self._own_epoch,
            layer=item.layer,
            start=item.span.start,
            end=item.span.stop,
            digest=digest,
            num_bytes=num_bytes,
            saved_at=item.saved_at,
        )
        self._send([encode(header), *payload])
        self._counters.num_units += 1
        self._counters.num_bytes += num_bytes

    def _wait_for_credit(self, transfer: OutgoingTransfer, num_bytes: int) -> bool:
        """Whether the unit may go. Bounded by the peer's liveness: a silent peer is lost, and then nothing goes."""
        began = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: self._may_send(transfer, num_bytes) or self._may_skip(transfer))
            self._counters.seconds_waiting_for_credit += self._clock() - began
            if self._may_skip(transfer):
                return False
            self._in_flight += num_bytes
            return True

    def _may_send(self, transfer: OutgoingTransfer, num_bytes: int) -> bool:
        return self._in_flight == 0 or self._in_flight + num_bytes <= self._credit_bytes

    def _may_skip(self, transfer: OutgoingTransfer) -> bool:
        return transfer.is_cancelled or self._is_lost

    def _finish(self, item: _End) -> None:
        if self.transfers.get(item.transfer.transfer_id) is not item.transfer:
            return
        place = "prefill.before_done" if isinstance(item.message, PrefillDone) else "prefill.before_closed"
        is_dropped = bool(failpoints.armed) and failpoints.hit(place)
        message = item.message if item.transfer.lease is None else self._end_read(item.transfer.lease, item)
        if not (self._is_lost or is_dropped):
            self.say(message)
        del self.transfers[item.transfer.transfer_id]
        if isinstance(message, PrefillDone):
            self._counters.num_transfers_sent += 1
        else:
            self._counters.num_transfers_closed += 1
        self._on_closed(item.transfer)

    def _end_read(self, lease: Lease, item: _End) -> FromPrefill:
        """The last word, which is another one if the lease has ended meanwhile."""
        try:
            self._leases.end_read(lease, was_read=isinstance(item.message, PrefillDone) and not self._is_lost)
        except LeaseError as error:
            return TransferFailed(
                transfer_id=item.transfer.transfer_id,
                epoch=self._own_epoch,
                kind=ErrorKind.KV_LOAD_FAILED,
                reason=str(error),
            )
        return item.message
