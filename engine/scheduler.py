"""Decides what runs in each step. Pure Python: ints in, a `Batch` out; no tensors, no sockets, no clock of its own.

  add_request
      |
      v                    the connector has its KV elsewhere: blocks taken and pinned, nothing scheduled
   waiting ------------------------------------> loading ---- load failed ----> FINISHED_ERROR
    |   ^  ^                                        |
    |   |  | cannot run for its own reason:         | received; the first token may come along, and may end it
    |   |  +- put aside, back in front after        v
    |   |     the pass                            loaded
    |   |                                           |
    |   +---- preempted, to the front ----+         | rejoins before anybody new is admitted: it owns blocks already
    |                                     |         |
    +-- all blocks for its tokens --> running <-----+
                                          |
                                          +--> FINISHED_STOPPED | FINISHED_LENGTH        abort, from anywhere:
                                                                                         FINISHED_ABORTED
One pass:
  1. loaded requests rejoin the running ones;
  2. running requests that decode get their token, growing by a block where needed and preempting where the pool is out;
  3. running requests with more to compute get their chunks;
  4. unless somebody was preempted, waiting requests are admitted while a seat, blocks and budget last.
Each of these in order of priority, lower first, and within one first come first served.

A request is admitted with blocks for all its known tokens or not at all: chunks never stall half way, only decoding
grows. The one preempted is, of the worst priority, the last admitted whose blocks no transfer needs. Preempted
requests recompute.

Whoever may still touch a block owns it: a finished request's blocks stay pinned until its transfers are over.
"""

from collections.abc import Callable, Sequence
from itertools import chain

from engine.admission import Admission, Verdict
from engine.batch import Batch, BatchResult, ScheduledRequest
from engine.block_manager import BlockManager
from engine.block_pool import BlockPool
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ErrorKind, PoolCorrupted, RequestError
from engine.grammar import GrammarError
from engine.grammar_pool import GrammarPool
from engine.grammar_room import GrammarRoom
from engine.kv_connector import SchedulerConnector
from engine.load_outcomes import LoadOutcomes
from engine.open_transfers import OpenTransfers
from engine.outputs import RequestOutput, SchedulerCounters
from engine.request import Request, RequestState, SampledToken
from engine.roster import Roster
from engine.sampling_params import check_vocab
from engine.step_plan import StepPlan


class Scheduler:
    """Owns all live requests and the block pool. One thread calls it: `schedule`, then `update` with the answer."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        *,
        model_digest: str,
        vocab_size: int | None = None,
        connector: SchedulerConnector | None,
        grammars: GrammarPool | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.connector = connector
        self.counters = SchedulerCounters()
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock
        # A request that alone outgrew the pool could never be resumed: it ends by length instead.
        self._max_num_tokens = min(max_model_len, num_blocks * cache.block_size)
        self._blocks = BlockManager(self.pool, cache, model_digest)
        self._transfers = OpenTransfers(self.pool)
        self._admission = Admission(self._blocks, self._transfers, connector, self.counters)
        self._roster = Roster(clock)
        self._outcomes = LoadOutcomes(
            self._roster, self._blocks, self._transfers, self.counters, self, config.kv_load_failure_policy
        )
        self._grammar_room = GrammarRoom(grammars, clock) if grammars is not None else None
        self._outbox: list[RequestOutput] = []
        self._is_stalled = False

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Waiting for a seat, for blocks, or for a reason of their own."""
        return len(self._roster.waiting)

    @property
    def num_loading(self) -> int:
        """Owning blocks, and waiting for KV to arrive in them or, briefly, for the next step."""
        return len(self._roster.loading) + len(self._roster.loaded)

    @property
    def num_open_transfers(self) -> int:
        return len(self._transfers)

    def has_work(self) -> bool:
        """Whether a step now could do something. False while only transfers, or a connector's answer, are awaited."""
        if (
            self._outbox
            or self._roster.loaded
            or (self.connector is not None and self.connector.has_pending_metadata())
        ):
            return True
        return bool(self._roster.running or self._roster.waiting) and not self._is_stalled

    def is_idle(self) -> bool:
        """Nothing lives, nothing is pinned, no transfer is open: only a new request can make work."""
        if self._roster.requests or self._outbox or self._transfers:
            return False
        if self.connector is None:
            return True
        return not (self.connector.has_open_transfers() or self.connector.has_pending_metadata())

    def check(self) -> None:
        """Raises `PoolCorrupted` if the books do not balance; when idle, if a block is not free."""
        self.pool.check()
        if self.is_idle() and self.pool.num_free != self.pool.num_blocks:
            raise PoolCorrupted(f"idle, but only {self.pool.num_free} of {self.pool.num_blocks} blocks are free")

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Raises `RequestError` if it could never be served."""
        if request.request_id in self._roster.requests or request.request_id in self._transfers:
            raise RequestError(f"request id {request.request_id} is in use", param="request_id")
        if request.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if request.num_prompt_tokens + 1 > self._max_num_tokens:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens; at most {self._max_num_tokens} fit, "
                "one of them an output token",
                param="prompt",
            )
        if self._vocab_size is not None:
            if max(request.prompt_token_ids) >= self._vocab_size:
                raise RequestError(f"token ids must be below {self._vocab_size}", param="prompt")
            check_vocab(request.sampling, self._vocab_size)
        if request.sampling.grammar is not None and self._grammar_room is None:
            raise RequestError("this engine follows no grammars", param="response_format")
        self._roster.add(request)
        if request.sampling.grammar is not None and self._grammar_room is not None:
            self._grammar_room.enter(request)
        self._is_stalled = False

    def abort_request(self, request_id: str) -> None:
        """Ends it now, in whatever state; its final output comes from the next `update`. Unknown ids are ignored."""
        request = self._roster.requests.get(request_id)
        if request is not None:
            self.finish(request, RequestState.FINISHED_ABORTED)

    def abort_all(self) -> None:
        for request_id in list(self._roster.requests):
            self.abort_request(request_id)

    # One pass

    def schedule(self) -> Batch:
        """The next step's work; may be empty. Every call is followed by `update`."""
        plan = StepPlan(self._config.max_num_batched_tokens, self._config.long_prefill_token_threshold)
        self._take_in_compiled()
        self._roster.rejoin_loaded()
        self._schedule_running(plan)
        if not plan.num_preempted:
            self._schedule_waiting(plan)
        if not plan.scheduled:
            self._end_deadlock(plan)
        self._is_stalled = not plan.scheduled and not plan.num_preempted
        self.counters.num_steps += 1
        return Batch(step=self.counters.num_steps, requests=tuple(plan.scheduled.values()))

    def _take_in_compiled(self) -> None:
        for request, reason in self._grammar_room.leave() if self._grammar_room is not None else ():
            self.finish(request, RequestState.FINISHED_ERROR, error=(ErrorKind.INVALID_REQUEST, reason))

    def _schedule_running(self, plan: StepPlan) -> None:
        """Decoding comes first: whatever the prompts, each decoding request has its token in every step."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._roster.running_by_priority():
            is_decoding = len(request.token_ids) - request.num_computed_tokens == 1
            (decoding if is_decoding else prefilling).append(request)
        for request in chain(decoding, prefilling):
            if request.state is RequestState.RUNNING and plan.budget and self._make_room(request, plan):
                plan.add(request)

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Slots for all its tokens. False: not in this step, because it was preempted itself or has to wait."""
        if self._blocks.covers_all_tokens(request):
            return True
        while not self.pool.num_free:
            victim = self._pick_victim(plan)
            if victim is None:
                return False
            self._preempt(victim, plan)
            if victim is request:
                return False
        self._blocks.grow(request)
        return True

    def _pick_victim(self, plan: StepPlan) -> Request | None:
        for request in reversed(self._roster.running_by_priority()):
            if request.request_id not in self._transfers and request.request_id not in plan.scheduled:
                return request
        return None

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._blocks.release(request)
        self._roster.send_back(request)
        request.may_load = False
        request.num_preemptions += 1
        plan.num_preempted += 1
        self.counters.num_preemptions += 1

    def _end_deadlock(self, plan: StepPlan) -> None:
        """Running requests wait for blocks, the pool is full of their own pins, and no transfer is open that could end
        one: somebody has to give way."""
        if (
            not self._roster.running
            or plan.num_preempted
            or self.connector is None
            or self.connector.has_open_transfers()
        ):
            return
        error = (ErrorKind.OVERLOADED, "the KV cache is full of blocks that are pinned for transfers")
        self.finish(self._roster.running_by_priority()[-1], RequestState.FINISHED_ERROR, error=error)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        put_aside = []
        while (
            self._roster.waiting and len(self._roster.running) + len(self._roster.loading) < self._config.max_num_seqs
        ):
            request = self._roster.waiting.pop_front()
            num_reserved = self._config.watermark_blocks if self._roster.running else 0
            match self._admission.admit(request, plan.budget, num_reserved):
                case Verdict.RUN:
                    self._roster.run(request)
                    plan.add(request)
                case Verdict.LOAD:
                    self._roster.load(request)
                case Verdict.PUT_ASIDE:
                    put_aside.append(request)
                case Verdict.NO_ROOM:
                    put_aside.append(request)
                    break
        self._roster.put_back(put_aside)

    # What came of it

    def update(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """Takes the worker's answer in. Requests that ended since `schedule` are passed over."""
        self._outcomes.disowned.clear()
        if result.connector_output:
            self._is_stalled = False
            self._outcomes.take(result.connector_output)
        for scheduled in batch.requests:
            request = self._roster.requests.get(scheduled.request_id)
            if request is not None and self._keeps_share(request):
                self._advance(request, scheduled, result)
        outputs, self._outbox = self._outbox, []
        return outputs

    def _keeps_share(self, request: Request) -> bool:
        return request.state is RequestState.RUNNING and request.request_id not in self._outcomes.disowned

    def _advance(self, request: Request, scheduled: ScheduledRequest, result: BatchResult) -> None:
        why_not = result.unsampled.get(request.request_id)
        if why_not is not None:
            self._blocks.forget(request, 0)
            self.finish(request, RequestState.FINISHED_ERROR, error=self._blame(request, scheduled, why_not))
            return
        start = scheduled.num_computed_tokens
        end = start + len(scheduled.token_ids)
        request.num_computed_tokens = end
        if start < request.num_prompt_tokens:
            self.counters.prompt_tokens_computed += min(end, request.num_prompt_tokens) - start
        # What was computed on top of KV that is not confirmed is not to be trusted either.
        if request.request_id not in self._transfers or self._transfers.find_load(request.request_id) is None:
            self._blocks.publish(request, start // self._blocks.block_size)
        request.take_prompt_logprobs(result.prompt_logprobs.get(request.request_id, ()))
        if scheduled.sampling is not None:
            self.append(request, result.sampled[request.request_id])

    def _blame(self, request: Request, scheduled: ScheduledRequest, why_not: str) -> tuple[ErrorKind, str]:
        """Whose fault it is that nothing could be sampled."""
        if request.matcher is not None and request.matcher.error is not None:
            return ErrorKind.INVALID_REQUEST, f"the grammar is too complex: {request.matcher.error}"
        sampling, banned = scheduled.sampling, set(scheduled.banned_token_ids)
        allowed = sampling.allowed_token_ids if sampling is not None else ()
        if scheduled.token_mask and (allowed or banned):
            return ErrorKind.INVALID_REQUEST, "allowed_token_ids, bad_words and the grammar leave no token to sample"
        if banned.issuperset(allowed or range(self._vocab_size or 0)) and banned:
            return ErrorKind.INVALID_REQUEST, "allowed_token_ids, bad_words and min_tokens leave no token to sample"
        return ErrorKind.INTERNAL, why_not

    def append(self, request: Request, token: SampledToken) -> None:
        request.append_output(token)
        self.counters.generated_tokens += 1
        state = request.finish_state_for(token.token_id)
        if state is None and request.num_tokens >= self._max_num_tokens:
            state = RequestState.FINISHED_LENGTH
        if request.matcher is not None:
            try:
                request.matcher.accept(token.token_id)
            except GrammarError as error:
                self.finish(request, RequestState.FINISHED_ERROR, error=(ErrorKind.INTERNAL, str(error)))
                return
            if request.matcher.is_over and state is not RequestState.FINISHED_STOPPED:
                request.is_last_text = token.token_id not in request.eos_token_ids
                state = RequestState.FINISHED_STOPPED
        if state is None:
            self._outbox.append(RequestOutput.of(request, (token,)))
        else:
            self.finish(request, state, new_tokens=(token,))

    def finish(
        self,
        request: Request,
        state: RequestState,
        *,
        new_tokens: Sequence[SampledToken] = (),
        error: tuple[ErrorKind, str] | None = None,
        is_fenced: bool = True,
    ) -> None:
        """The one way out for every request."""
        if state.has_ended_well:
            self._outcomes.note_used(request)
        self._roster.end(request, state)
        request.error = error
        kv_transfer_params = self._hand_over_blocks(request, is_fenced)
        self._blocks.release(request)
        self._outbox.append(RequestOutput.of(request, new_tokens, state, kv_transfer_params))
        self._is_stalled = False

    def _hand_over_blocks(self, request: Request, is_fenced: bool) -> dict[str, object] | None:
        """Leaves the blocks pinned if a transfer may still touch them."""
        if self.connector is None:
            return None
        is_held, kv_transfer_params = self.connector.request_finished(request, tuple(request.block_ids))
        if not is_held and is_fenced:
            self._transfers.end_all(request.request_id)
        elif request.request_id not in self._transfers:
            self._transfers.begin_ship(request.request_id, request.block_ids)
        return kv_transfer_params
