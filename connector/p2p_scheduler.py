"""The scheduler side of `P2PConnector`: which positions are loaded from where, and which are shipped. Pure bookkeeping.

One class serves both ends; a request says by its `kv_transfer` which end it is on:

  RemotePrefill  on a decode node: have a prefill node compute the prompt beyond the local hit
  ShipKV         on a prefill node: ship [start, end) to the decode node that granted the blocks
  None           neither: compute here, keep it here
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.transfer_settings import LoadMode
from engine.batch import Batch, ConnectorOutput, ScheduledRequest
from engine.errors import ErrorKind
from engine.kv_connector import SchedulerConnector
from engine.request import Request, RequestState, SampledToken


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """`candidates`: names of prefill nodes, best first; empty for any that is ready.
    `num_tokens`: how many leading prompt tokens they can supply; None for the whole prompt."""

    candidates: tuple[str, ...] = ()
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ShipKV:
    """The positions `[start, end)` go to the decode node whose grant the request is named after."""

    start: int
    end: int
    wants_first_token: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A grant to send: the request and the positions `[start, end)` of its block table."""

    request: Request
    start: int
    end: int
    block_ids: tuple[int, ...]
    candidates: tuple[str, ...]
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
    error: tuple[ErrorKind, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PMetadata:
    """One step's instructions to the worker side."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    ended: tuple[ShipEnd, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass(slots=True)
class _Ship:
    next: int
    end: int


@dataclass(slots=True)
class _Pending:
    loads: list[Load] = field(default_factory=list)
    ended: list[ShipEnd] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


class P2PSchedulerConnector(SchedulerConnector):
    """See the module's text."""

    def __init__(self, load_mode: LoadMode) -> None:
        self._is_sync = load_mode == "sync"
        self._loading: set[str] = set()
        self._ships: dict[str, _Ship] = {}
        self._pending = _Pending()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not isinstance(request.kv_transfer, RemotePrefill):
            return 0, False
        num_external = self._load_end(request, request.kv_transfer) - num_computed_tokens
        return (num_external, not self._is_sync) if num_external > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        match request.kv_transfer:
            case RemotePrefill(candidates=candidates) if num_external_tokens > 0:
                end = self._load_end(request, request.kv_transfer)
                self._loading.add(request.request_id)
                self._pending.loads.append(
                    Load(
                        request=request,
                        start=end - num_external_tokens,
                        end=end,
                        block_ids=tuple(block_ids),
                        candidates=candidates,
                        is_sync=self._is_sync,
                    )
                )
            case ShipKV(start=start, end=end):
                self._ships.setdefault(request.request_id, _Ship(start, end))

    def build_connector_meta(self, batch: Batch) -> P2PMetadata:
        pending, self._pending = self._pending, _Pending()
        saves = (self._save_for(request) for request in batch.requests) if self._ships else ()
        return P2PMetadata(
            loads=tuple(pending.loads),
            saves=tuple(save for save in saves if save is not None),
            ended=tuple(pending.ended),
            cancelled=tuple(pending.cancelled),
        )

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in (*output.sent, *output.received, *output.failed):
            failure = output.failed.get(request_id)
            if failure is None or failure.is_fenced:
                self._loading.discard(request_id)
                self._ships.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        request_id = request.request_id
        if request_id in self._loading:
            self._pending.cancelled.append(request_id)
            return True, None
        if isinstance(request.kv_transfer, ShipKV):
            self._pending.ended.append(_ship_end(request, request.kv_transfer))
            return request_id in self._ships, None
        return False, None

    def has_open_transfers(self) -> bool:
        return bool(self._loading or self._ships) or self.has_pending_metadata()

    def has_pending_metadata(self) -> bool:
        return bool(self._pending.loads or self._pending.ended or self._pending.cancelled)

    def _load_end(self, request: Request, source: RemotePrefill) -> int:
        # Under a sync load the forward of this node's own last prompt token gives the first output token.
        end = request.num_prompt_tokens - int(self._is_sync)
        return end if source.num_tokens is None else min(end, source.num_tokens)

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
    if request.state in (RequestState.FINISHED_STOPPED, RequestState.FINISHED_LENGTH):
        return ShipEnd(
            request_id=request.request_id,
            first_token=request.output[0] if ship.wants_first_token else None,
            num_cached_tokens=request.num_cached_tokens or 0,
        )
    error = request.error or (ErrorKind.KV_LOAD_FAILED, "the prefill was aborted")
    return ShipEnd(request_id=request.request_id, error=error)
