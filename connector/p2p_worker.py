"""The worker side of `P2PConnector`: carries out one step's instructions with a `KVReceiver` and a `KVSender`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from connector.codec import PROTOCOL_VERSION
from connector.held_params import held_params
from connector.identity import NodeIdentity
from connector.kv_receiver import KVReceiver
from connector.kv_sender import GrantTaker, KVSender
from connector.leases import LeaseTable, prompt_digest
from connector.link import Links
from connector.loads import LoadOrder
from connector.p2p_scheduler import Load, P2PMetadata, PullKV
from connector.peer_messages import PeerHello, Prefill, Pull
from connector.shared_kv import SharedKVMemory
from connector.transfer_settings import TransferSettings
from engine.batch import ConnectorOutput
from engine.kv_connector import WorkerConnector
from engine.request import Request

_IDLE = P2PMetadata()


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PPlace:
    """Where this node stands among its peers."""

    identity: NodeIdentity
    settings: TransferSettings = field(default_factory=TransferSettings)
    listen: str | None = None
    """Address on which decode nodes may dial us; None: we prefill for nobody."""
    prefill_addresses: tuple[str, ...] = ()
    """The peer table: the only addresses that are ever dialled for KV."""
    shared_memory: SharedKVMemory | None = None
    """The memory that holds our KV, where it is to be offered to peers."""


@dataclass(slots=True)
class _ForwardMeasure:
    """How long a forward's layers take, without what it waited at barriers."""

    began: float = 0.0
    waited: float = 0.0

    def begin(self) -> None:
        self.began, self.waited = time.monotonic(), 0.0

    def seconds_per_layer(self, num_layers: int) -> float:
        return max(0.0, time.monotonic() - self.began - self.waited) / num_layers


class P2PWorkerConnector(WorkerConnector):
    """`listen` may come before the model is loaded, so that peers know the address early; they are answered later."""

    def __init__(self, place: P2PPlace, links: Links, taker: GrantTaker) -> None:
        self._place = place
        self._links = links
        self._taker = taker
        self._metadata = _IDLE
        self._measure = _ForwardMeasure()
        self._num_layers = 0
        self.leases = LeaseTable(place.settings.lease_seconds)
        self.sender = KVSender(place.identity, place.settings, taker, self.leases)
        self.receiver: KVReceiver | None = None
        self.listen_address: str | None = None

    def listen(self) -> None:
        """Binds the KV address, if this node has one. Raises `LinkError`."""
        if self._place.listen is not None and self.listen_address is None:
            self.listen_address = self.sender.listen(self._links, self._place.listen)

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        place = self._place
        self.listen()
        self._num_layers = len(kv_caches)
        self.sender.start(kv_caches)
        if place.prefill_addresses:
            self.receiver = KVReceiver(self._hello(kv_caches), place.settings, self._taker.wake)
            self.receiver.start(kv_caches, self._links, place.prefill_addresses)

    def has_ready_peer(self, candidates: Sequence[str]) -> bool:
        return self.receiver is not None and self.receiver.has_ready_peer(candidates)

    def hold(self, request: Request, block_ids: Sequence[int]) -> dict[str, object]:
        """A lease on the finished request's KV; the `kv_transfer_params` by which another node finds it."""
        num_tokens = request.num_computed_tokens
        lease = self.leases.hold(request.request_id, block_ids, request.token_ids[:num_tokens], request.cache_salt)
        return held_params(self._place.identity, self.listen_address or "", lease, request)

    def bind_connector_metadata(self, metadata: object) -> None:
        assert isinstance(metadata, P2PMetadata)
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = _IDLE

    def start_load_kv(self) -> None:
        self.sender.num_steps += 1
        if self.receiver is not None:
            for load in self._metadata.loads:
                self.receiver.start_load(self._order(load))
            for request_id in self._metadata.cancelled:
                self.receiver.cancel(request_id)
            for source in self._metadata.released:
                self.receiver.release(source)
        for ended in self._metadata.ended:
            if ended.error is None:
                self.sender.finish(ended.request_id, ended.first_token, ended.num_cached_tokens, ended.prompt_logprobs)
            else:
                self.sender.fail(ended.request_id, *ended.error)

    def wait_for_layer_load(self, layer: int) -> None:
        if self.receiver is None:
            return
        if layer == 0:
            self._measure.begin()
        if self._metadata.barrier_ids:
            self._measure.waited += self.receiver.wait_for_layer(layer, self._metadata.barrier_ids)

    def save_kv_layer(self, layer: int) -> None:
        if self.receiver is not None and layer == self._num_layers - 1:
            self.receiver.layer_seconds = self._measure.seconds_per_layer(self._num_layers)
        for save in self._metadata.saves:
            self.sender.save(save.request_id, layer, save.span, save.block_ids)

    def wait_for_save(self) -> None:
        """Nothing to wait for: units are read from pinned blocks, not from the step's own buffers."""

    def get_finished(self, finished_ids: frozenset[str]) -> ConnectorOutput:
        closed = self.sender.take_closed() | self.leases.take_over()
        if self.receiver is None:
            return ConnectorOutput(sent=closed)
        loads = self.receiver.take_finished()
        return ConnectorOutput(
            sent=closed | loads.closed, early=loads.early, received=loads.received, failed=loads.failed
        )

    def shutdown(self) -> None:
        self.sender.close()
        if self.receiver is not None:
            self.receiver.close()

    def _hello(self, kv_caches: Sequence[torch.Tensor]) -> PeerHello:
        place = self._place
        offer = None
        if place.shared_memory is not None and place.settings.transport != "zmq":
            offer = place.shared_memory.offer(kv_caches[0].shape[0])
        return PeerHello(
            protocol_version=PROTOCOL_VERSION,
            name=place.identity.name,
            epoch=place.identity.epoch,
            model=place.identity.model,
            credit_bytes=place.settings.credit_bytes,
            wants_digests=place.settings.digest,
            shared_memory=offer,
        )

    def _order(self, load: Load) -> LoadOrder:
        assert self.receiver is not None
        if isinstance(load.source, PullKV):
            return self._pull_order(load, load.source)
        request = load.request
        grant = Prefill(
            transfer_id=self.receiver.mint_transfer_id(),
            prompt_token_ids=list(request.prompt_token_ids[: load.end]),
            wants_first_token=load.end == request.num_prompt_tokens,
            sampling=request.sampling,
            eos_token_ids=sorted(request.eos_token_ids),
            cache_salt=request.cache_salt,
            priority=request.priority,
            start=load.start,
            end=load.end,
            block_ids=list(load.block_ids),
            trace=request.trace,
        )
        return LoadOrder(
            request_id=request.request_id,
            grant=grant,
            candidates=load.source.candidates,
            may_run_early=not load.is_sync and grant.wants_first_token,
        )

    def _pull_order(self, load: Load, source: PullKV) -> LoadOrder:
        assert self.receiver is not None
        request = load.request
        pull = Pull(
            transfer_id=self.receiver.mint_transfer_id(),
            lease_id=source.lease_id,
            digest=prompt_digest(request.prompt_token_ids[: load.end], request.cache_salt),
            start=load.start,
            end=load.end,
            block_ids=list(load.block_ids),
        )
        return LoadOrder(
            request_id=request.request_id,
            grant=pull,
            candidates=(source.peer,),
            epoch=source.epoch,
            may_run_early=False,
            num_cached_tokens=source.num_cached_tokens,
        )
