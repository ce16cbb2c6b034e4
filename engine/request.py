"""A request and its life.

                    +----------------------------+
                    v                            |
  WAITING --> WAITING_FOR_REMOTE_KVS --+         |   KV loaded: back to the front of the queue
     |  ^          |                   |         |
     |  +----------+-------------------+---------+
     v             |
  RUNNING <--> PREEMPTED
     |             |
     +------+------+--> FINISHED_STOPPED | FINISHED_LENGTH | FINISHED_ABORTED | FINISHED_ERROR

WAITING_FOR_GRAMMAR and WAITING_FOR_STREAMING_REQ are side rooms of WAITING with the same way in and out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from engine.errors import ErrorKind, InvalidTransition
from engine.grammar_matcher import GrammarMatcher
from engine.prompt_logprobs import PromptLogprobs, covered_end, follows
from engine.sampling_params import SamplingParams
from engine.trace import TraceContext


class RequestState(IntEnum):
    """States in the field's words. The finished family sorts last: `is_finished` is one comparison."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9

    @property
    def is_finished(self) -> bool:
        return self >= RequestState.FINISHED_STOPPED

    @property
    def has_ended_well(self) -> bool:
        return self in (RequestState.FINISHED_STOPPED, RequestState.FINISHED_LENGTH)


_S = RequestState
_FINISHED = frozenset(state for state in _S if state.is_finished)
_ENDED_EARLY = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})

ALLOWED_MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.WAITING: _ENDED_EARLY
    | {_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS, _S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_STREAMING_REQ},
    _S.WAITING_FOR_GRAMMAR: _ENDED_EARLY | {_S.WAITING},
    _S.WAITING_FOR_STREAMING_REQ: _ENDED_EARLY | {_S.WAITING},
    # The first token arrives with the end of the load and may already end the request.
    _S.WAITING_FOR_REMOTE_KVS: _FINISHED | {_S.WAITING},
    _S.RUNNING: _FINISHED | {_S.PREEMPTED},
    _S.PREEMPTED: _ENDED_EARLY | {_S.RUNNING},
    **{state: frozenset() for state in _FINISHED},
}


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. `top_logprobs` holds (token id, logprob), likeliest first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence being generated. Owned by the scheduler; nobody else changes it.

    The counters, one definition each:
      num_prompt_tokens    tokens the client sent
      num_tokens           prompt plus output tokens known so far
      num_computed_tokens  leading tokens whose KV is in this node's blocks, or on its way there under an async load
      num_cached_tokens    prompt tokens that were found rather than computed, here or on the prefill node; set once
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    priority: int = 0
    """Lower goes first."""
    may_load: bool = True
    """False once it was preempted or a load of it failed: from then on it computes here."""
    kv_transfer: object | None = None
    """What the connector needs to know about this request: where to load from, or where to ship to."""
    trace: TraceContext | None = None
    arrival_time: float = 0.0

    matcher: GrammarMatcher | None = None
    """Where the output stands in its grammar; set before the request runs."""
    state: RequestState = RequestState.WAITING
    output: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_external_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    stop_reason: int | None = None
    is_last_text: bool = False
    """It stopped at a token that is no end token: its grammar was complete."""
    error: tuple[ErrorKind, str] | None = None
    history: list[tuple[RequestState, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.history.append((self.state, self.arrival_time))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished

    def move(self, state: RequestState, now: float) -> None:
        """Enter `state` at time `now`. Raises `InvalidTransition` with the request's story."""
        if state not in ALLOWED_MOVES[self.state]:
            raise InvalidTransition(f"request {self.request_id}: {self.state.name} -> {state.name}; {self.story()}")
        self.state = state
        self.history.append((state, now))

    def story(self) -> str:
        """The states so far with the seconds since arrival."""
        return ", ".join(f"{state.name}@{at - self.arrival_time:.3f}s" for state, at in self.history)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether it still wants logprobs of its prompt: all of it must be computed, wherever its KV may be found."""
        is_wanted = self.sampling.prompt_logprobs is not None
        return is_wanted and covered_end(self.prompt_logprobs) < self.num_prompt_tokens

    def take_prompt_logprobs(self, pieces: Sequence[PromptLogprobs]) -> None:
        """Consecutive pieces. The first position begins anew: the prompt is being computed once more."""
        for piece in pieces:
            if piece.start == 1:
                self.prompt_logprobs.clear()
            assert follows(piece, self.prompt_logprobs), f"request {self.request_id}: logprobs from {piece.start}"
            self.prompt_logprobs.append(piece)

    def append_output(self, token: SampledToken) -> None:
        self.output.append(token)
        self.token_ids.append(token.token_id)

    def finish_state_for(self, token_id: int) -> RequestState | None:
        """The state that `token_id`, just appended, leads to; None to go on. Sets `stop_reason` for a stop token."""
        sampling = self.sampling
        if self.num_output_tokens >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in self.eos_token_ids:
                return RequestState.FINISHED_STOPPED
            if token_id in sampling.stop_token_ids:
                self.stop_reason = token_id
                return RequestState.FINISHED_STOPPED
        if self.num_output_tokens >= sampling.max_tokens:
            return RequestState.FINISHED_LENGTH
        return None
