"""What leaves the engine: tokens as they are made, and one final word for each request. And what it counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ErrorKind
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request, RequestState, SampledToken


class RequestOutput(NamedTuple):
    """What one request gained in one step. Exactly one output of a request has `finish_state` set: the last."""

    request_id: str
    new_tokens: Sequence[SampledToken]
    finish_state: RequestState | None
    stop_reason: int | None
    """The stop token that ended it; None for the model's own end token."""
    num_prompt_tokens: int
    num_cached_tokens: int
    error: tuple[ErrorKind, str] | None
    kv_transfer_params: dict[str, object] | None
    """With the final output of a request whose KV is held for others: how to get at it."""
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """With the first token, if the request wanted them: all of its prompt's."""
    is_last_text: bool = False
    """Stopped, and yet the last token is a part of the text: nothing could follow it, by the request's grammar."""

    @classmethod
    def of(
        cls,
        request: Request,
        new_tokens: Sequence[SampledToken],
        finish_state: RequestState | None = None,
        kv_transfer_params: dict[str, object] | None = None,
    ) -> "RequestOutput":
        return cls(
            request.request_id,
            new_tokens,
            finish_state,
            request.stop_reason,
            len(request.prompt_token_ids),
            request.num_cached_tokens or 0,
            request.error,
            kv_transfer_params,
            tuple(request.prompt_logprobs) if new_tokens and request.num_output_tokens == len(new_tokens) else (),
            request.is_last_text,
        )


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grow. All in tokens unless the name says otherwise."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_late_connector_ids: int = 0
    """Reports about transfers that were not open: duplicates, or later than they could matter."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens_computed: int = 0
    """Computed on this node, recomputation after a preemption included; 0 where all prompts came from elsewhere."""
    prompt_tokens_loaded: int = 0
    num_early_admissions: int = 0
    """Requests that ran before all their KV was in."""
    num_loads_recomputed: int = 0
    """Loads that failed and whose requests went on by computing here."""
    recomputed_tokens: int = 0
    """What those loads were to bring and did not."""
    generated_tokens: int = 0
