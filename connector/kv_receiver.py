"""The decode node's end of KV transfer.

  grant            units, first token        PrefillDone, all units in
  start_load() --> on_unit() ... on_unit() --> received
       |                |  |
       |                |  +-- the rest will not hold up a step --> early, and later received
       |                +-- bad digest, TransferFailed, peer lost, no progress --> the next candidate, or failed
       +--------------------- cancel() ------------------------------------------> closed

A transfer's blocks may be used again once its request id was handed out by `take_finished`, with two exceptions: early,
and a failure that is not fenced (shared memory, and the writer went silent). Those transfers wait in quarantine until
the writer acknowledges or its process has ended.

The engine's thread calls the public methods, the link's thread delivers; one lock guards everything, and a unit is
written into its blocks under that lock, so nothing is written after a transfer was removed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from connector import failpoints
from connector.incoming_transfer import IncomingTransfer
from connector.kv_intake import KVIntake
from connector.link import Links
from connector.loads import FinishedLoads, LoadOrder, OpenLoad, ReceiverCounters, result_of
from connector.p2p_scheduler import PullKV
from connector.peer_messages import (
    CancelTransfer,
    Credit,
    FirstToken,
    FromPrefill,
    PeerHello,
    PeerPong,
    Prefill,
    PrefillDone,
    PromptPiece,
    Pull,
    ReleaseLease,
    TransferClosed,
    TransferFailed,
    Unit,
)
from connector.peer_table import PeerTable
from connector.prefill_peer import PrefillPeer
from connector.quarantine import Quarantine
from connector.quarantine import is_fenced as peer_is_fenced
from connector.transfer_settings import TransferSettings
from engine.batch import LoadFailure
from engine.errors import ErrorKind

logger = logging.getLogger(__name__)

NUM_RECENT_TRANSFERS = 32
_FAILPOINTS: dict[type[FromPrefill], str] = {
    Unit: "decode.on_unit",
    FirstToken: "decode.on_first_token",
    PrefillDone: "decode.on_done",
    TransferClosed: "decode.on_closed",
}


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
        self.peers = PeerTable(hello, settings.peer_timeout, self, clock)
        self.layer_seconds = 0.0
        """How long the node's forward takes for one layer, as measured last."""
        self._epoch = hello.epoch
        self._settings = settings
        self._notify = notify
        self._clock = clock
        self._intake = KVIntake((), self.counters, checks_digests=settings.digest)
        self._open: dict[str, OpenLoad] = {}
        self._by_request: dict[str, str] = {}
        self._awaited: dict[str, str] = {}
        """Leases that waiting requests will pull -> name of the holder."""
        self._quarantine = Quarantine()
        self._finished = FinishedLoads()
        self._changed = threading.Condition()
        self._num_minted = 0

    def start(self, kv_caches: Sequence[torch.Tensor], links: Links, addresses: Sequence[str]) -> None:
        self._intake = KVIntake(kv_caches, self.counters, checks_digests=self._settings.digest)
        self.peers.dial(links, addresses)
        links.every(self._settings.heartbeat_interval, self.tick)

    def close(self) -> None:
        self.peers.close()

    # The engine's side

    def ready_peers(self) -> list[str]:
        return self.peers.ready_names()

    def has_ready_peer(self, candidates: Sequence[str]) -> bool:
        return self.peers.pick(candidates) is not None

    def start_load(self, order: LoadOrder) -> None:
        """Sends the grant to the first candidate that is ready; a named failure if none is."""
        with self._changed:
            if isinstance(order.grant, Pull):
                self._awaited.pop(order.grant.lease_id, None)
            peer = self.peers.pick(order.candidates, epoch=order.epoch)
            if peer is not None:
                self._grant(order, order.grant, peer, frozenset())
            else:
                self.counters.num_without_node += 1
                self._finished.failed[order.request_id] = self._nobody_for(order)
                self._report()

    def await_lease(self, source: PullKV) -> None:
        """A request that waits will pull this: its lease is renewed with every heartbeat until then."""
        with self._changed:
            self._awaited[source.lease_id] = source.peer

    def release(self, source: PullKV) -> None:
        """Nobody will pull this."""
        with self._changed:
            self._awaited.pop(source.lease_id, None)
            peer = self.peers.pick((source.peer,), epoch=source.epoch)
            if peer is not None:
                peer.send(ReleaseLease(lease_id=source.lease_id))

    def mint_transfer_id(self) -> str:
        """Unique over all nodes and restarts: the epoch is."""
        self._num_minted += 1
        return f"{self._epoch}-{self._num_minted}"

    def cancel(self, request_id: str) -> None:
        """The request is over. Its id comes out of `take_finished` as closed once its blocks are out of reach."""
        with self._changed:
            opened = self._open.get(self._by_request.get(request_id, ""))
            if opened is None:
                return
            if not (failpoints.armed and failpoints.hit("decode.before_cancel")):
                opened.peer.send(CancelTransfer(transfer_id=opened.transfer.transfer_id))
            opened.is_cancelled = True
            if opened.peer.transport == "zmq":
                self._remove(opened)
                self._finished.closed.add(request_id)
                self._report()

    def wait_for_layer(self, layer: int, request_ids: Sequence[str]) -> float:
        """Returns when `layer` is complete for every one of the requests that has not failed meanwhile; the seconds."""
        with self._changed:
            if not any(self._is_layer_pending(layer, request_id) for request_id in request_ids):
                return 0.0
            began = self._clock()
            while any(self._is_layer_pending(layer, request_id) for request_id in request_ids):
                if not self._changed.wait(self._settings.transfer_timeout):
                    self._expire(self._clock())
            seconds = self._clock() - began
            self._count_barrier(seconds)
            return seconds

    def take_finished(self) -> FinishedLoads:
        with self._changed:
            # Between two arrivals, too: the later the next step begins, the less it would wait.
            for opened in self._open.values():
                self._admit_early(opened)
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
                peer.tick(
                    [name for name, opened in self._open.items() if opened.peer is peer],
                    [lease_id for lease_id, name in self._awaited.items() if name == peer.name],
                )
            self._expire(self._clock())
            self._empty_quarantine()

    def peer_changed(self) -> None:
        self._notify()

    def peer_lost(self, peer: PrefillPeer, kind: ErrorKind, reason: str) -> None:
        with self._changed:
            lost = [opened for opened in self._open.values() if opened.peer is peer]
            # Asked once for all: it may take a moment.
            is_fenced = bool(lost) and peer_is_fenced(peer)
            for opened in lost:
                self._fail(opened, kind, f"prefill node {peer.name}: {reason}", is_fenced=is_fenced)

    def peer_message(self, peer: PrefillPeer, message: FromPrefill, frames: Sequence[memoryview]) -> None:
        if failpoints.armed and failpoints.hit(_FAILPOINTS.get(type(message), "")):
            return
        match message:
            case Unit():
                self._on_unit(peer, message, frames[1:])
            case PromptPiece():
                self._on_prompt_piece(peer, message)
            case FirstToken():
                self._on_first_token(peer, message)
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
        if payload and not (failpoints.armed and failpoints.hit("decode.before_ack")):
            peer.send(Credit(num_bytes=unit.num_bytes))

    def _take_in(self, opened: OpenLoad, unit: Unit, payload: Sequence[memoryview]) -> None:
        transfer = opened.transfer
        problem = self._intake.take(transfer, unit, payload, self._clock())
        if problem is not None:
            reason = f"prefill node {opened.peer.name}, layer {unit.layer}, [{unit.start}, {unit.end}): {problem}"
            self._fail(opened, ErrorKind.KV_LOAD_FAILED, reason)
            return
        self._changed.notify_all()
        self._finish_if_complete(opened)
        self._admit_early(opened)

    def peer_first_token(self, peer: PrefillPeer, message: FirstToken) -> None:
        with self._changed:
            if (opened := self._find(peer, message.transfer_id, message.epoch)) is not None:
                self._take_first_token(opened, message)

    def _on_prompt_piece(self, peer: PrefillPeer, piece: PromptPiece) -> None:
        with self._changed:
            opened = self._find(peer, piece.transfer_id, piece.epoch)
            if opened is None or not opened.transfer.take_prompt_logprobs(piece.logprobs, self._clock()):
                # Whoever misses it computes the prompt again.
                self.counters.num_late_units += 1

    def _on_first_token(self, peer: PrefillPeer, message: FirstToken) -> None:
        with self._changed:
            opened = self._find(peer, message.transfer_id, message.epoch)
            if opened is None:
                self.counters.num_late_units += 1
            else:
                self._take_first_token(opened, message)

    def _take_first_token(self, opened: OpenLoad, message: FirstToken) -> None:
        transfer = opened.transfer
        transfer.last_progress = self._clock()
        if transfer.first_token is None:
            transfer.first_token, transfer.first_token_at = message, self._clock()
            self._admit_early(opened)

    def _admit_early(self, opened: OpenLoad) -> None:
        """If it may run: the first token is known, and what is missing will not hold up the step."""
        transfer = opened.transfer
        is_wanted = self._settings.early_admission and opened.order.may_run_early and not opened.is_early
        if not is_wanted or opened.is_cancelled or transfer.first_token is None or transfer.first_token.token is None:
            return
        if transfer.transfer_id not in self._open:
            return
        stall = transfer.expected_stall(self._clock(), self.layer_seconds)
        if stall is not None and stall <= self._settings.max_barrier_stall:
            opened.is_early = True
            self._finished.early[transfer.request_id] = result_of(transfer)
            self._report()

    def _on_done(self, peer: PrefillPeer, done: PrefillDone) -> None:
        with self._changed:
            opened = self._find(peer, done.transfer_id, done.epoch)
            if opened is None:
                self.counters.num_late_units += 1
                return
            opened.transfer.take_end(done, self._clock())
            self.counters.num_hidden_bytes += opened.transfer.num_hidden_bytes or 0
            self._finish_if_complete(opened)
            if done.transfer_id in self._open and not opened.is_cancelled:
                reason = f"prefill node {peer.name} ended the transfer before it was complete"
                self._fail(opened, ErrorKind.KV_LOAD_FAILED, reason, is_fenced=True)
            elif opened.is_cancelled:
                self._on_closed(peer, done.transfer_id)

    def _finish_if_complete(self, opened: OpenLoad) -> None:
        transfer = opened.transfer
        if opened.is_cancelled or not transfer.is_complete:
            return
        self._remove(opened)
        self.recent.append(transfer)
        self.counters.num_transfers_received += 1
        self._finished.received[transfer.request_id] = result_of(transfer)
        self._report()

    def _on_failed(self, peer: PrefillPeer, failed: TransferFailed) -> None:
        with self._changed:
            opened = self._find(peer, failed.transfer_id, failed.epoch)
            if opened is not None and not opened.is_cancelled:
                self._fail(opened, failed.kind, f"prefill node {peer.name}: {failed.reason}", is_fenced=True)
        self._on_closed(peer, failed.transfer_id)

    def _on_closed(self, peer: PrefillPeer, transfer_id: str) -> None:
        """The acknowledgement: the writer will not touch the blocks again."""
        with self._changed:
            self._close(self._quarantine.acknowledged(peer, transfer_id))
            opened = self._open.get(transfer_id)
            if opened is None or opened.peer is not peer:
                return
            if opened.is_cancelled:
                self._remove(opened)
                self._finished.closed.add(opened.transfer.request_id)
                self._report()
            else:
                reason = f"prefill node {peer.name} closed the transfer"
                self._fail(opened, ErrorKind.KV_LOAD_FAILED, reason, is_fenced=True)

    def _on_unknown(self, peer: PrefillPeer, transfer_ids: Sequence[str]) -> None:
        for transfer_id in transfer_ids:
            self._on_closed(peer, transfer_id)

    # Under the lock

    def _nobody_for(self, order: LoadOrder) -> LoadFailure:
        states = self.peers.describe()
        if isinstance(order.grant, Pull):
            reason = f"the holder of the KV, {order.candidates[0]}, is not there in the same epoch ({states})"
            return LoadFailure(kind=ErrorKind.KV_LOAD_FAILED, reason=reason)
        who = f"none of {', '.join(order.candidates)}" if order.candidates else "no prefill node"
        return LoadFailure(
            kind=ErrorKind.NO_NODE_READY,
            reason=f"{who} is ready ({states})",
            is_final=self._settings.fallback == "fail",
        )

    def _grant(self, order: LoadOrder, grant: Prefill | Pull, peer: PrefillPeer, tried: frozenset[str]) -> None:
        transfer = IncomingTransfer(
            transfer_id=grant.transfer_id,
            request_id=order.request_id,
            start=grant.start,
            end=grant.end,
            block_ids=grant.block_ids,
            num_layers=self._intake.num_layers,
            granted_at=self._clock(),
            num_cached_tokens=order.num_cached_tokens,
        )
        self._open[grant.transfer_id] = OpenLoad(order, transfer, peer, peer.epoch, tried | {peer.name})
        self._by_request[order.request_id] = grant.transfer_id
        if not (failpoints.armed and failpoints.hit("decode.before_grant")):
            peer.send(grant)

    def _grant_again(self, opened: OpenLoad, num_valid_tokens: int) -> bool:
        """Has the next candidate supply what is missing. False if there is none."""
        peer = self.peers.pick(opened.order.candidates, opened.tried)
        if peer is None or isinstance(opened.order.grant, Pull):
            return False
        start = min(num_valid_tokens, opened.transfer.end - 1)
        grant = replace(opened.order.grant, transfer_id=self.mint_transfer_id(), start=start)
        self.counters.num_next_candidates += 1
        self._grant(opened.order, grant, peer, opened.tried)
        return True

    def _find(self, peer: PrefillPeer, transfer_id: str, epoch: str) -> OpenLoad | None:
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
                self._fail(opened, ErrorKind.DEADLINE_EXCEEDED, reason)

    def _fail(self, opened: OpenLoad, kind: ErrorKind, reason: str, *, is_fenced: bool | None = None) -> None:
        """`is_fenced` where the writer itself said that it is done; None to find out."""
        transfer = opened.transfer
        logger.warning("KV load of request %s failed: %s", transfer.request_id, reason)
        self._remove(opened)
        self.recent.append(transfer)
        self.counters.num_transfers_failed += 1
        opened.peer.send(CancelTransfer(transfer_id=transfer.transfer_id))
        if is_fenced is None:
            is_fenced = peer_is_fenced(opened.peer)
        if not is_fenced:
            self._quarantine.add(opened)
        if opened.is_cancelled:
            self._finished.closed |= {transfer.request_id} if is_fenced else set()
        else:
            self._move_on(opened, kind, reason, is_fenced=is_fenced)
        self._report()

    def _move_on(self, opened: OpenLoad, kind: ErrorKind, reason: str, *, is_fenced: bool) -> None:
        """To the next candidate if that can help and is safe, else to the scheduler."""
        num_valid = opened.transfer.num_valid_tokens
        is_worth_it = is_fenced and kind is not ErrorKind.INVALID_REQUEST and not opened.is_early
        if not (is_worth_it and self._grant_again(opened, num_valid)):
            self._finished.failed[opened.transfer.request_id] = LoadFailure(
                kind=kind, reason=reason, num_valid_tokens=num_valid, is_fenced=is_fenced
            )

    def _remove(self, opened: OpenLoad) -> None:
        self._open.pop(opened.transfer.transfer_id)
        self._by_request.pop(opened.transfer.request_id)

    def _empty_quarantine(self) -> None:
        for request_id in self._quarantine.sweep():
            self._close(request_id)

    def _close(self, request_id: str | None) -> None:
        if request_id is not None:
            self._finished.closed.add(request_id)
            self._report()

    def _count_barrier(self, seconds: float) -> None:
        self.counters.num_barrier_waits += 1
        self.counters.barrier_seconds += seconds
        self.counters.longest_barrier_seconds = max(self.counters.longest_barrier_seconds, seconds)

    def _report(self) -> None:
        self._changed.notify_all()
        self._notify()
