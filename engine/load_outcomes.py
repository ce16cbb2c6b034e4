"""What becomes of requests when their transfers report: received, early, failed, sent.

  early     runs, though its load is open            received  confirmed; others may find its KV
  failed    recompute what is missing, or an error   sent      nobody reads or writes its blocks any more

An id may be late, repeated, or unknown: counted, never an error.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from engine.batch import ConnectorOutput, LoadFailure, LoadResult
from engine.block_manager import BlockManager
from engine.errors import ErrorKind
from engine.open_transfers import Load, OpenTransfers
from engine.outputs import SchedulerCounters
from engine.request import Request, RequestState, SampledToken
from engine.roster import Roster


class RequestEnds(Protocol):
    """The scheduler, as seen from here: what goes out to the client."""

    def append(self, request: Request, token: SampledToken) -> None: ...

    def finish(
        self,
        request: Request,
        state: RequestState,
        *,
        new_tokens: Sequence[SampledToken] = (),
        error: tuple[ErrorKind, str] | None = None,
        is_fenced: bool = True,
    ) -> None: ...


class LoadOutcomes:
    """`disowned`: requests whose share of the present step was computed on KV that turned out not to be there."""

    def __init__(
        self,
        roster: Roster,
        blocks: BlockManager,
        transfers: OpenTransfers,
        counters: SchedulerCounters,
        ends: RequestEnds,
        policy: Literal["recompute", "fail"],
    ) -> None:
        self.disowned: set[str] = set()
        self._roster = roster
        self._blocks = blocks
        self._transfers = transfers
        self._counters = counters
        self._ends = ends
        self._policy = policy

    def take(self, output: ConnectorOutput) -> None:
        """Acts on one step's reports."""
        for request_id, result in output.early.items():
            self._count_if_late(self._on_early(request_id, result))
        for request_id, failure in output.failed.items():
            self._count_if_late(self._on_failed(request_id, failure))
        for request_id, result in output.received.items():
            self._count_if_late(self._on_received(request_id, result))
        for request_id in output.sent:
            self._count_if_late(self._on_sent(request_id))

    def note_used(self, request: Request) -> None:
        """The request comes to its end before the load that it ran on was reported. Every barrier had opened by its
        first forward, so all the KV came; its first token may also have come without."""
        load = self._transfers.find_load(request.request_id)
        if load is not None and request.state is RequestState.RUNNING:
            self._counters.prompt_tokens_loaded += load.num_tokens

    def _count_if_late(self, was_open: bool) -> None:
        self._counters.num_late_connector_ids += not was_open

    def _on_sent(self, request_id: str) -> bool:
        if self._transfers.end_abandoned(request_id) or self._transfers.end_ship(request_id):
            return True
        # A cancelled or unfenced load of a request that is gone ends this way, too.
        return request_id not in self._roster.requests and self._transfers.end_load(request_id)

    def _on_received(self, request_id: str, result: LoadResult) -> bool:
        load = self._transfers.find_load(request_id)
        if load is None:
            return False
        self._transfers.end_load(request_id)
        request = self._roster.requests.get(request_id)
        if request is not None and self._takes_prompt_logprobs(request, result):
            self._confirm_load(request, load, result)
        elif request is not None:
            self._recompute(request, load, 0, is_fenced=True)
        return True

    def _takes_prompt_logprobs(self, request: Request, result: LoadResult) -> bool:
        """Whether it now has all that it wanted. They go ahead of the first token, and what is lost is lost with it."""
        if request.lacks_prompt_logprobs:
            request.take_prompt_logprobs(result.prompt_logprobs)
        return not request.lacks_prompt_logprobs

    def _confirm_load(self, request: Request, load: Load, result: LoadResult) -> None:
        """The KV is in and proven: other requests may find it."""
        self._counters.prompt_tokens_loaded += load.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = max(load.start, result.num_remote_cached_tokens)
        if request.state is RequestState.WAITING_FOR_REMOTE_KVS and result.first_token is None:
            # Some forward has to yield the logits of the last token.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._blocks.publish(request, 0)
        if request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            self._leave_loading(request, result.first_token)

    def _leave_loading(self, request: Request, first_token: SampledToken | None) -> None:
        if first_token is not None:
            self._ends.append(request, first_token)
        if not request.is_finished:
            self._roster.finish_loading(request)

    def _on_early(self, request_id: str, result: LoadResult) -> bool:
        """Runs from now on, though the load is open: its layers wait at their barriers."""
        request = self._roster.loading.get(request_id)
        if request is None:
            return False
        if not self._takes_prompt_logprobs(request, result):
            return True
        self._counters.num_early_admissions += 1
        if request.num_cached_tokens is None:
            request.num_cached_tokens = max(self._local_hit_of(request_id), result.num_remote_cached_tokens)
        self._leave_loading(request, result.first_token)
        return True

    def _local_hit_of(self, request_id: str) -> int:
        load = self._transfers.find_load(request_id)
        return load.start if load is not None else 0

    def _on_failed(self, request_id: str, failure: LoadFailure) -> bool:
        if request_id not in self._transfers:
            return False
        load = self._transfers.find_load(request_id)
        if load is None:
            self._transfers.end_all(request_id)
        elif failure.is_fenced:
            # A ship of the same blocks goes on, and keeps them pinned.
            self._transfers.end_load(request_id)
        request = self._roster.requests.get(request_id)
        if request is not None:
            self._lose_kv(request, load, failure)
        return True

    def _lose_kv(self, request: Request, load: Load | None, failure: LoadFailure) -> None:
        num_valid = failure.num_valid_tokens
        if load is not None and request.lacks_prompt_logprobs:
            num_valid = 0
        if load is not None:
            num_valid = load.start if num_valid is None else max(num_valid, load.start)
            self._blocks.forget(request, num_valid)
        if load is None or failure.is_final or self._policy == "fail":
            error = (failure.kind, failure.reason)
            self._ends.finish(request, RequestState.FINISHED_ERROR, error=error, is_fenced=failure.is_fenced)
        else:
            self._recompute(request, load, num_valid or 0, is_fenced=failure.is_fenced)

    def _recompute(self, request: Request, load: Load, num_valid: int, *, is_fenced: bool) -> None:
        """Goes on here with what did arrive; without any of it where a silent writer may still reach the blocks."""
        request.may_load = False
        self.disowned.add(request.request_id)
        self._counters.num_loads_recomputed += 1
        self._counters.recomputed_tokens += load.start + load.num_tokens - num_valid
        if is_fenced:
            request.num_computed_tokens = min(num_valid, request.num_tokens - 1)
            self._blocks.publish(request, 0)
            if request.request_id in self._roster.loading:
                self._leave_loading(request, None)
        else:
            self._transfers.abandon_load(request.request_id)
            self._blocks.release(request)
            self._roster.send_back(request)
