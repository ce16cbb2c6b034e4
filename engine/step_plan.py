"""One scheduling pass in the making: what is left of the token budget, and who got a share."""

from collections.abc import Sequence

from engine.batch import ScheduledRequest
from engine.grammar_matcher import leaves_some
from engine.prompt_logprobs import WantedLogprobs
from engine.request import Request


class StepPlan:
    def __init__(self, budget: int, long_prefill_token_threshold: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self.scheduled: dict[str, ScheduledRequest] = {}
        self._max_chunk = long_prefill_token_threshold or budget

    def add(self, request: Request) -> None:
        """`request` runs in this step: from its first token that is not computed, as many as fit."""
        num_tokens = min(request.num_tokens - request.num_computed_tokens, self._max_chunk, self.budget)
        self.budget -= num_tokens
        self.scheduled[request.request_id] = _share_of(request, num_tokens)


def _share_of(request: Request, num_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_tokens
    sampling = request.sampling if end == request.num_tokens else None
    needs_history = sampling is not None and sampling.needs_history
    output_position = request.num_output_tokens
    mask = request.matcher.mask() if request.matcher is not None and sampling is not None else b""
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids[start:end],
        num_computed_tokens=start,
        block_ids=tuple(request.block_ids),
        sampling=sampling,
        output_position=output_position,
        token_mask=mask,
        banned_token_ids=_banned(request, mask) if sampling is not None else (),
        prompt_token_ids=tuple(request.prompt_token_ids) if needs_history else (),
        output_token_ids=tuple(request.token_ids[request.num_prompt_tokens :]) if needs_history else (),
        prompt_logprobs=_wanted_logprobs(request, start, end) if request.lacks_prompt_logprobs else None,
    )


def _wanted_logprobs(request: Request, start: int, end: int) -> WantedLogprobs | None:
    next_token_ids = request.prompt_token_ids[start + 1 : end + 1]
    return WantedLogprobs(request.sampling.prompt_logprobs or 0, next_token_ids) if next_token_ids else None


def _banned(request: Request, mask: bytes) -> Sequence[int]:
    """mask: what the grammar allows, if there is one. It goes before min_tokens, not before bad words."""
    sampling = request.sampling
    banned = _ends_of_bad_words(request) if sampling.bad_words else []
    if request.num_output_tokens < sampling.min_tokens:
        end_tokens = frozenset() if sampling.ignore_eos else request.eos_token_ids
        with_ends = [*banned, *end_tokens.union(sampling.stop_token_ids)]
        banned = with_ends if not mask or leaves_some(mask, with_ends) else banned
    return sorted(banned) if banned else ()


def _ends_of_bad_words(request: Request) -> list[int]:
    """The last token of each bad word whose other tokens the output ends with."""
    longest = max(map(len, request.sampling.bad_words))
    tail = request.token_ids[max(request.num_prompt_tokens, request.num_tokens - longest + 1) :]
    return [word[-1] for word in request.sampling.bad_words if list(word[:-1]) == tail[len(tail) - len(word) + 1 :]]
