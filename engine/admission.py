"""Whether a waiting request can have its blocks now, and where its KV comes from.

    local prefix --> connector: tokens beyond it --> all blocks or none --> pins --> connector told

Nothing changes unless the request is admitted: the same questions may be asked again in the next step.
"""

from enum import Enum, auto

from engine.block_manager import BlockManager
from engine.kv_connector import SchedulerConnector
from engine.open_transfers import Load, OpenTransfers
from engine.outputs import SchedulerCounters
from engine.request import Request, RequestState


class Verdict(Enum):
    """What becomes of a waiting request in this pass."""

    RUN = auto()
    LOAD = auto()
    """It has blocks; its KV will arrive in them."""
    PUT_ASIDE = auto()
    """It cannot run for its own reason; others may."""
    NO_ROOM = auto()
    """It cannot run for lack of blocks or budget; nor can whoever stands behind it."""


_SIDE_ROOMS = frozenset({RequestState.WAITING_FOR_GRAMMAR, RequestState.WAITING_FOR_STREAMING_REQ})


class Admission:
    """Gives waiting requests their blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        transfers: OpenTransfers,
        connector: SchedulerConnector | None,
        counters: SchedulerCounters,
    ) -> None:
        self._blocks = blocks
        self._transfers = transfers
        self._connector = connector
        self._counters = counters

    def admit(self, request: Request, budget: int, num_reserved: int) -> Verdict:
        """On RUN and LOAD the request owns its blocks, `num_reserved` others are still free, and
        `num_computed_tokens` counts what was found."""
        if request.state in _SIDE_ROOMS:
            return Verdict.PUT_ASIDE
        hit = self._blocks.find_local_hit(request)
        num_local = len(hit) * self._blocks.block_size
        num_external, is_async = self._ask_connector(request, num_local)
        if num_external is None:
            return Verdict.PUT_ASIDE
        if not is_async and not budget:
            return Verdict.NO_ROOM
        if not self._blocks.allocate(request, hit, num_reserved):
            return Verdict.NO_ROOM
        self._account_for(request, num_local, num_external)
        self._open_transfers(request, num_local)
        return Verdict.LOAD if is_async else Verdict.RUN

    def _ask_connector(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """The connector's answer, cut to what the request lacks."""
        if self._connector is None or not request.may_load:
            return 0, False
        num_external, is_async = self._connector.get_num_new_matched_tokens(request, num_local)
        if num_external is None:
            return None, False
        # A synchronous load is followed by a forward in this very step, which needs a token to compute.
        num_missing = request.num_tokens - num_local - (0 if is_async else 1)
        num_external = max(0, min(num_external, num_missing))
        return num_external, is_async and num_external > 0

    def _account_for(self, request: Request, num_local: int, num_external: int) -> None:
        self._counters.prefix_queries += request.num_tokens
        self._counters.prefix_hits += num_local
        request.num_external_tokens = num_external
        request.num_computed_tokens = num_local + num_external
        if request.num_cached_tokens is None and not num_external:
            request.num_cached_tokens = num_local

    def _open_transfers(self, request: Request, num_local: int) -> None:
        """Pins first, then tells the connector: nobody learns of a block that could still be handed to another."""
        if self._connector is None:
            return
        if request.num_external_tokens:
            load = Load(num_local, request.num_external_tokens)
            self._transfers.begin_load(request.request_id, load, request.block_ids)
        if request.state is RequestState.WAITING and self._connector.ships_kv(request):
            self._transfers.begin_ship(request.request_id, request.block_ids)
        self._connector.update_state_after_alloc(request, tuple(request.block_ids), request.num_external_tokens)
