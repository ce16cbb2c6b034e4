"""The scheduler side of `P2PConnector`: which positions are loaded from where, and which are shipped. Pure bookkeeping.

One class serves both ends; a request says by its `kv_transfer` which end it is on:

  RemotePrefill  on a decode node: have a prefill node compute the prompt beyond the local hit
  ShipKV         on a prefill node: ship [start, end) to the decode node that granted the blocks
  HoldKV         on any node: keep the KV under a lease when the request is over, for somebody to pull
  PullKV         on any node: load what another node holds
  None           neither: compute here, keep it here
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from connector import failpoints
from connector.transfer_settings import TransferSettings
from engine.batch import Batch, ConnectorOutput, ScheduledRequest
from engine.errors import ErrorKind
from engine.kv_connector import SchedulerConnector
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request, SampledToken


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """`candidates`: names of prefill nodes, best first; empty for any that is ready."""

    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShipKV:
    """The positions `[start, end)` go to the decode node whose grant the request is named after."""

    start: int
    end: int
    wants_first_token: bool = True


@dataclass(frozen=True, slots=True)
class HoldKV:
    """The KV stays when the request is over."""


@dataclass(frozen=True, slots=True)
class PullKV:
    """The leading `num_tokens` positions are held by `peer` in its epoch `epoch`, under `lease_id`."""

    peer: str
    epoch: str
    lease_id: str
    num_tokens: int
    num_cached_tokens: int = 0
    """Of these, what the holder had found in its own cache."""
    is_held_after: bool = False
    """What this node makes of it is held in turn, for somebody's next pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An order to send: the request, the positions `[start, end)` of its block table, and who has them."""

    request: Request
    start: int
    end: int
    block_ids: tuple[int, ...]
    source: RemotePrefill | PullKV
    is_sync: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Positions of one request that are complete after this step's forward, layer by layer."""

    request_id: str
    span: range
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipEnd:
    """A shipped request is over: with its first token, or with an error."""

    request_id: str
    first_token: SampledToken | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    error: tuple[ErrorKind, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PMetadata:
    """One step's instructions to the worker side."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    ended: tuple[ShipEnd, ...] = ()
    cancelled: tuple[str, ...] = ()
    released: tuple[PullKV, ...] = ()
    """Held KV that nobody will come for."""
    barrier_ids: tuple[str, ...] = ()
    """Requests of this step whose load is still open: each layer waits for them."""


_WhyLocal = Literal["short", "no node"]


@dataclass(slots=True)
class _Ship:
    next: int
    end: int


@dataclass(slots=True)
class _Pending:
    loads: list[Load] = field(default_factory=list)
    ended: list[ShipEnd] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[PullKV] = field(default_factory=list)


@dataclass(slots=True)
class LocalPrefills:
    """Prompts that could have been computed elsewhere, by why they were not. Only ever grow."""

    num_short: int = 0
    """Less was missing than --remote-prefill-threshold."""
    num_without_node: int = 0
    """No prefill node was ready."""


class P2PSchedulerConnector(SchedulerConnector):
    """`has_ready_peer(candidates)` tells whether one of the named prefill nodes (of all, for none named) is ready; it
    is called often and must be cheap. `hold(request, block_ids)` makes a lease on a finished request's KV and returns
    the params by which another node finds it."""

    def __init__(
        self,
        settings: TransferSettings,
        has_ready_peer: Callable[[Sequence[str]], bool],
        hold: Callable[[Request, Sequence[int]], dict[str, object]],
    ) -> None:
        self.local_prefills = LocalPrefills()
        self._settings = settings
        self._has_ready_peer = has_ready_peer
        self._hold = hold
        self._is_sync = settings.load_mode == "sync"
        self._loading: set[str] = set()
        self._ships: dict[str, _Ship] = {}
        self._held: set[str] = set()
        self._pending = _Pending()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        source = request.kv_transfer
        if not isinstance(source, RemotePrefill | PullKV) or self._must_compute(request, source):
            return 0, False
        if isinstance(source, RemotePrefill) and self._why_local(request, source, num_computed_tokens) is not None:
            return 0, False
        num_external = self._load_end(request, source) - num_computed_tokens
        return (num_external, not self._is_sync) if num_external > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        match request.kv_transfer:
            case (RemotePrefill() | PullKV()) as source if num_external_tokens > 0:
                if failpoints.armed:
                    failpoints.hit("decode.after_alloc")
                end = self._load_end(request, source)
                self._loading.add(request.request_id)
                self._pending.loads.append(
                    Load(
                        request=request,
                        start=end - num_external_tokens,
                        end=end,
                        block_ids=tuple(block_ids),
                        source=source,
                        is_sync=self._is_sync,
                    )
                )
            case RemotePrefill() as source if request.may_load:
                self._count_local(request, source)
            case PullKV() as source if request.may_load:
                # Everything was here already.
                self._pending.released.append(source)
            case ShipKV(start=start, end=end):
                self._ships.setdefault(request.request_id, _Ship(start, end))

    def ships_kv(self, request: Request) -> bool:
        return isinstance(request.kv_transfer, ShipKV)

    def build_connector_meta(self, batch: Batch) -> P2PMetadata:
        pending, self._pending = self._pending, _Pending()
        saves = (self._save_for(request) for request in batch.requests) if self._ships else ()
        return P2PMetadata(
            loads=tuple(pending.loads),
            saves=tuple(save for save in saves if save is not None),
            ended=tuple(pending.ended),
            cancelled=tuple(pending.cancelled),
            released=tuple(pending.released),
            barrier_ids=tuple(r.request_id for r in batch.requests if r.request_id in self._loading)
            if self._loading
            else (),
        )

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in (*output.sent, *output.received, *output.failed):
            failure = output.failed.get(request_id)
            if failure is None or failure.is_fenced:
                self._loading.discard(request_id)
                self._held.discard(request_id)
                self._ships.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        request_id = request.request_id
        if request_id in self._loading:
            self._pending.cancelled.append(request_id)
            return True, None
        match request.kv_transfer:
            case ShipKV() as ship:
                self._pending.ended.append(_ship_end(request, ship))
                return request_id in self._ships, None
            case HoldKV() | PullKV(is_held_after=True) if request.state.has_ended_well:
                self._held.add(request_id)
                return True, self._hold(request, block_ids)
            case PullKV() as source if request.may_load and not block_ids:
                self._pending.released.append(source)
        return False, None

    def has_open_transfers(self) -> bool:
        return bool(self._loading or self._ships or self._held) or self.has_pending_metadata()

    def has_pending_metadata(self) -> bool:
        pending = self._pending
        return bool(pending.loads or pending.ended or pending.cancelled or pending.released)

    def _must_compute(self, request: Request, source: RemotePrefill | PullKV) -> bool:
        """KV alone does not tell its prompt's logprobs. Only a node that computes the whole prompt can send them."""
        return request.lacks_prompt_logprobs and (self._is_sync or isinstance(source, PullKV))

    def _why_local(self, request: Request, source: RemotePrefill, num_computed_tokens: int) -> _WhyLocal | None:
        if request.num_prompt_tokens - num_computed_tokens < self._settings.remote_prefill_threshold:
            return "short"
        if self._settings.fallback == "local" and not self._has_ready_peer(source.candidates):
            return "no node"
        return None

    def _count_local(self, request: Request, source: RemotePrefill) -> None:
        match self._why_local(request, source, request.num_computed_tokens):
            case "short":
                self.local_prefills.num_short += 1
            case "no node":
                self.local_prefills.num_without_node += 1

    def _load_end(self, request: Request, source: RemotePrefill | PullKV) -> int:
        # Under a sync load the forward of this node's own last prompt token gives the first output token.
        end = request.num_prompt_tokens - int(self._is_sync)
        return min(end, source.num_tokens) if isinstance(source, PullKV) else end

    def _save_for(self, scheduled: ScheduledRequest) -> Save | None:
        ship = self._ships.get(scheduled.request_id)
        if ship is None:
            return None
        # From the first position not shipped yet, so that what was a prefix hit here goes out with the first chunk.
        end = min(ship.end, scheduled.num_computed_tokens + len(scheduled.token_ids))
        if end <= ship.next:
            return None
        span = range(ship.next, end)
        ship.next = end
        return Save(request_id=scheduled.request_id, span=span, block_ids=tuple(scheduled.block_ids))


def _ship_end(request: Request, ship: ShipKV) -> ShipEnd:
    if request.state.has_ended_well:
        return ShipEnd(
            request_id=request.request_id,
            first_token=request.output[0] if ship.wants_first_token else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            prompt_logprobs=tuple(request.prompt_logprobs),
        )
    error = request.error or (ErrorKind.KV_LOAD_FAILED, "the prefill was aborted")
    return ShipEnd(request_id=request.request_id, error=error)
