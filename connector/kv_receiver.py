"""The decode node's end of KV transfer.

  grant            units                     PrefillDone, all units in
  start_load() --> on_unit() ... on_unit() --> received
       |                |
       |                +-- bad digest, TransferFailed, peer lost, no progress --> failed
       +--------------------- cancel() ------------------------------------------> closed

A transfer's blocks may be used again once its request id was handed out by `take_finished`, with one exception: a
failure that is not fenced (shared memory, and the writer went silent). Those transfers wait in quarantine until the
writer acknowledges or its process has ended.

The engine's thread calls the public methods, the link's thread delivers; one lock guards everything, and a unit is
written into its blocks under that lock, so nothing is written after a transfer was removed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from connector.incoming_transfer import IncomingTransfer
from connector.kv_unit import scatter_unit, unit_num_bytes
from connector.link import Links
from connector.peer_messages import (
    CancelTransfer,
    Credit,
    FromPrefill,
    PeerHello,
    PeerPong,
    Prefill,
    PrefillDone,
    TransferClosed,
    TransferFailed,
    Unit,
)
from connector.prefill_peer import PeerState, PrefillPeer
from connector.shared_kv import PeerProcess
from connector.transfer_settings import TransferSettings
from engine.batch import LoadFailure, LoadResult
from engine.errors import ErrorKind

logger = logging.getLogger(__name__)

NUM_RECENT_TRANSFERS = 32


@dataclass(slots=True)
class ReceiverCounters:
    """Only ever grow."""

    num_bytes: int = 0
    num_units: int = 0
    num_late_units: int = 0
    num_digest_mismatches: int = 0
    num_transfers_received: int = 0
    num_transfers_failed: int = 0


@dataclass(slots=True)
class FinishedLoads:
    """What `take_finished` hands out; each request id once."""

    received: dict[str, LoadResult] = field(default_factory=dict)
    failed: dict[str, LoadFailure] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    """Cancelled or quarantined before; nothing reaches their blocks any more."""


@dataclass(slots=True)
class _Open:
    transfer: IncomingTransfer
    peer: PrefillPeer
    epoch: str
    is_cancelled: bool = False


@dataclass(slots=True)
class _Quarantined:
    transfer_id: str
    request_id: str
    peer: PrefillPeer
    epoch: str
    process: PeerProcess | None


class KVReceiver:
    """Grants, takes units in, reports. Implements `PeerOwner`."""

    def __init__(
        self,
        hello: PeerHello,
        settings: TransferSettings,
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = ReceiverCounters()
        self.recent: deque[IncomingTransfer] = deque(maxlen=NUM_RECENT_TRANSFERS)
        self.peers: list[PrefillPeer] = []
        self._hello = hello
        self._settings = settings
        self._notify = notify
        self._clock = clock
        self._kv_caches: Sequence[torch.Tensor] = ()
        self._open: dict[str, _Open] = {}
        self._by_request: dict[str, str] = {}
        self._quarantine: dict[str, _Quarantined] = {}
        self._finished = FinishedLoads()
        self._changed = threading.Condition()
        self._num_minted = 0

    def start(self, kv_caches: Sequence[torch.Tensor], links: Links, addresses: Sequence[str]) -> None:
        self._kv_caches = kv_caches
        for address in addresses:
            self.peers.append(PrefillPeer(address, self._hello, self._settings.peer_timeout, self, self._clock))
            self.peers[-1].dial(links)
        links.every(self._settings.heartbeat_interval, self.tick)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    # The engine's side

    def ready_peers(self) -> list[str]:
        return [peer.name for peer in self.peers if peer.state is PeerState.READY]

    def start_load(self, request_id: str, grant: Prefill, candidates: Sequence[str]) -> None:
        """Sends the grant to the first candidate that is ready; a named failure if none is."""
        with self._changed:
            peer = self._pick(candidates)
            if peer is None:
                states = ", ".join(f"{p.name}: {p.reason or p.state.value}" for p in self.peers)
                self._fail_request(request_id, ErrorKind.NO_NODE_READY, f"no prefill node is ready ({states})")
                return
            transfer = IncomingTransfer(
                transfer_id=grant.transfer_id,
                request_id=request_id,
                start=grant.start,
                end=grant.end,
                block_ids=grant.block_ids,
                num_layers=len(self._kv_caches),
                granted_at=self._clock(),
            )
            self._open[grant.transfer_id] = _Open(transfer, peer, peer.epoch)
            self._by_request[request_id] = grant.transfer_id
            peer.send(grant)

    def mint_transfer_id(self) -> str:
        """Unique over all nodes and restarts: the epoch is."""
        self._num_minted += 1
        return f"{self._hello.epoch}-{self._num_minted}"

    def cancel(self, request_id: str) -> None:
        """The request is over. Its id comes out of `take_finished` as closed once its blocks are out of reach."""
        with self._changed:
            opened = self._open.get(self._by_request.get(request_id, ""))
            if opened is None:
                return
            opened.peer.send(CancelTransfer(transfer_id=opened.transfer.transfer_id))
            opened.is_cancelled = True
            if opened.peer.transport == "zmq":
                self._remove(opened)
                self._finished.closed.add(request_id)
                self._report()

    def wait_for_layer(self, layer: int, request_ids: Sequence[str]) -> None:
        """Returns when `layer` is complete for every one of the requests that has not failed meanwhile."""
        with self._changed:
            while any(self._is_layer_pending(layer, request_id) for request_id in request_ids):
                if not self._changed.wait(self._settings.transfer_timeout):
                    self._expire(self._clock())

    def take_finished(self) -> FinishedLoads:
        with self._changed:
            finished, self._finished = self._finished, FinishedLoads()
            return finished

    def open_transfers(self) -> list[IncomingTransfer]:
        with self._changed:
            return [opened.transfer for opened in self._open.values()]

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    # The link's side

    def tick(self) -> None:
        with self._changed:
            # Under the lock, so that no grant overtakes the list of what is wanted.
            for peer in self.peers:
                peer.tick([name for name, opened in self._open.items() if opened.peer is peer])
            self._expire(self._clock())
            self._empty_quarantine()

    def peer_changed(self) -> None:
        self._notify()

    def peer_lost(self, peer: PrefillPeer, kind: ErrorKind, reason: str) -> None:
        with self._changed:
            for opened in [o for o in self._open.values() if o.peer is peer]:
                self._fail(opened, kind, f"prefill node {peer.name}: {reason}", is_fenced=peer.transport == "zmq")

    def peer_message(self, peer: PrefillPeer, message: FromPrefill, frames: Sequence[memoryview]) -> None:
        match message:
            case Unit():
                self._on_unit(peer, message, frames[1:])
            case PrefillDone():
                self._on_done(peer, message)
            case TransferFailed():
                self._on_failed(peer, message)
            case TransferClosed():
                self._on_closed(peer, message.transfer_id)
            case PeerPong(unknown_transfer_ids=unknown):
                self._on_unknown(peer, unknown)

    def _on_unit(self, peer: PrefillPeer, unit: Unit, payload: Sequence[memoryview]) -> None:
        with self._changed:
            opened = self._find(peer, unit.transfer_id, unit.epoch)
            if opened is None or opened.is_cancelled:
                self.counters.num_late_units += 1
            else:
                self._take_in(opened, unit, payload)
        if payload:
            peer.send(Credit(num_bytes=unit.num_bytes))

    def _take_in(self, opened: _Open, unit: Unit, payload: Sequence[memoryview]) -> None:
        transfer = opened.transfer
        problem = self._check(transfer, unit, payload)
        if problem is not None:
            reason = f"prefill node {opened.peer.name}, layer {unit.layer}, [{unit.start}, {unit.end}): {problem}"
            self._fail(opened, ErrorKind.KV_LOAD_FAILED, reason, is_fenced=opened.peer.transport == "zmq")
            return
        if payload:
            data = torch.frombuffer(payload[0], dtype=torch.uint8)
            scatter_unit(self._kv_caches[unit.layer], transfer.block_ids, unit.start, unit.end, data)
        transfer.add(unit.layer, unit.start, unit.end, self._clock())
        transfer.num_units += 1
        transfer.num_bytes += unit.num_bytes
        self.counters.num_units += 1
        self.counters.num_bytes += unit.num_bytes
        self._changed.notify_all()
        self._finish_if_complete(opened)

    def _check(self, transfer: IncomingTransfer, unit: Unit, payload: Sequence[memoryview]) -> str | None:
        if not transfer.fits(unit.layer, unit.start, unit.end):
            return "outside of what was granted"
        expected = unit_num_bytes(self._kv_caches[unit.layer], unit.start, unit.end)
        if unit.num_bytes != expected or (payload and payload[0].nbytes != expected):
            return f"{payload[0].nbytes if payload else unit.num_bytes} bytes instead of {expected}"
        if payload and xxhash.xxh3_64_digest(payload[0]) != unit.digest:
            self.counters.num_digest_mismatches += 1
            return "the digest does not match"
        return None

    def _on_done(self, peer: PrefillPeer, done: PrefillDone) -> None:
        with self._changed:
            opened = self._find(peer, done.transfer_id, done.epoch)
            if opened is None:
                self.counters.num_late_units += 1
                return
            opened.transfer.done = done
            opened.transfer.last_progress = self._clock()
            self._finish_if_complete(opened)
            if done.transfer_id in self._open and not opened.is_cancelled:
                reason = f"prefill node {peer.name} ended the transfer before it was complete"
                self._fail(opened, ErrorKind.KV_LOAD_FAILED, reason)
            elif opened.is_cancelled:
                self._on_closed(peer, done.transfer_id)

    def _finish_if_complete(self, opened: _Open) -> None:
        transfer = opened.transfer
        if opened.is_cancelled or not transfer.is_complete or transfer.done is None:
            return
        self._remove(opened)
        self.recent.append(transfer)
        self.counters.num_transfers_received += 1
        self._finished.received[transfer.request_id] = LoadResult(
            first_token=transfer.done.first_token, num_remote_cached_tokens=transfer.done.num_cached_tokens
        )
        self._report()

    def _on_failed(self, peer: PrefillPeer, failed: TransferFailed) -> None:
        with self._changed:
            opened = self._find(peer, failed.transfer_id, failed.epoch)
            if opened is not None and not opened.is_cancelled:
                self._fail(opened, failed.kind, f"prefill node {peer.name}: {failed.reason}")
        self._on_closed(peer, failed.transfer_id)

    def _on_closed(self, peer: PrefillPeer, transfer_id: str) -> None:
        """The acknowledgement: the writer will not touch the blocks again."""
        with self._changed:
            quarantined = self._quarantine.get(transfer_id)
            if quarantined is not None and quarantined.peer is peer and quarantined.epoch == peer.epoch:
                self._release(quarantined)
            opened = self._open.get(transfer_id)
            if opened is None or opened.peer is not peer:
                return
            if opened.is_cancelled:
                self._remove(opened)
                self._finished.closed.add(opened.transfer.request_id)
                self._report()
            else:
                self._fail(opened, ErrorKind.KV_LOAD_FAILED, f"prefill node {peer.name} closed the transfer")

    def _on_unknown(self, peer: PrefillPeer, transfer_ids: Sequence[str]) -> None:
        for transfer_id in transfer_ids:
            self._on_closed(peer, transfer_id)

    # Under the lock

    def _pick(self, candidates: Sequence[str]) -> PrefillPeer | None:
        ready = {peer.name: peer for peer in self.peers if peer.state is PeerState.READY}
        for name in candidates or list(ready):
            if name in ready:
                return ready[name]
        return None

    def _find(self, peer: PrefillPeer, transfer_id: str, epoch: str) -> _Open | None:
        opened = self._open.get(transfer_id)
        if opened is None or opened.peer is not peer or opened.epoch != epoch:
            return None
        return opened

    def _is_layer_pending(self, layer: int, request_id: str) -> bool:
        opened = self._open.get(self._by_request.get(request_id, ""))
        return opened is not None and not opened.transfer.is_layer_complete(layer)

    def _expire(self, now: float) -> None:
        for opened in list(self._open.values()):
            progress = max(opened.transfer.last_progress, opened.peer.engine_progress_at)
            if now - progress > self._settings.transfer_timeout:
                reason = f"no progress from prefill node {opened.peer.name} for {now - progress:.1f} s"
                self._fail(opened, ErrorKind.DEADLINE_EXCEEDED, reason, is_fenced=opened.peer.transport == "zmq")

    def _fail(self, opened: _Open, kind: ErrorKind, reason: str, *, is_fenced: bool = True) -> None:
        transfer = opened.transfer
        logger.warning("KV load of request %s failed: %s", transfer.request_id, reason)
        self._remove(opened)
        self.recent.append(transfer)
        self.counters.num_transfers_failed += 1
        opened.peer.send(CancelTransfer(transfer_id=transfer.transfer_id))
        if not is_fenced:
            self._quarantine[transfer.transfer_id] = _Quarantined(
                transfer.transfer_id, transfer.request_id, opened.peer, opened.epoch, opened.peer.process
            )
        if not opened.is_cancelled:
            self._fail_request(transfer.request_id, kind, reason, is_fenced=is_fenced)
        elif is_fenced:
            self._finished.closed.add(transfer.request_id)
        self._empty_quarantine()
        self._report()

    def _fail_request(self, request_id: str, kind: ErrorKind, reason: str, *, is_fenced: bool = True) -> None:
        self._finished.failed[request_id] = LoadFailure(kind=kind, reason=reason, is_fenced=is_fenced)
        self._report()

    def _remove(self, opened: _Open) -> None:
        self._open.pop(opened.transfer.transfer_id)
        self._by_request.pop(opened.transfer.request_id)

    def _empty_quarantine(self) -> None:
        """Releases what a dead process held, and asks the living ones again: the first cancel may have been lost."""
        for quarantined in list(self._quarantine.values()):
            if quarantined.process is not None and quarantined.process.has_ended:
                self._release(quarantined)
            elif quarantined.peer.state is PeerState.READY:
                quarantined.peer.send(CancelTransfer(transfer_id=quarantined.transfer_id))

    def _release(self, quarantined: _Quarantined) -> None:
        del self._quarantine[quarantined.transfer_id]
        self._finished.closed.add(quarantined.request_id)
        self._report()

    def _report(self) -> None:
        self._changed.notify_all()
        self._notify()
