"""POST /v1/completions"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.errors import RequestError
from engine.grammar import Grammar
from server.answer import Answer, AnswerOptions
from server.choice import Delta
from server.generation import Generation
from server.kv_transfer import check_leg, leg_of
from server.logprobs import CompletionLogprobs
from server.openapi import answers
from server.prompts import Prompt, max_prompt_len
from server.protocol import CompletionBody, refuse_unsupported
from server.request_id import adopt_request_id
from server.request_options import answer_options, output_options, priority_of
from server.respond import raise_if_gone, respond
from server.response_schema import Completion, CompletionChunk
from server.sampling import base_sampling, for_choice, output_budget
from server.service import Job, Service, Submission
from server.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **answers(Completion, events=CompletionChunk, example=EXAMPLE))
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        with service.released_on_failure(leg_of(body)):
            answer = await _start(body, request, service)
        return await respond(request, answer, stream=bool(body.stream))

    return router


async def _start(body: CompletionBody, request: Request, service: Service) -> "CompletionAnswer":
    arrival = time.monotonic()
    model = service.model_name(body.model)
    _check(body)
    max_model_len = service.admit(len(body.prompt) * max(body.n or 1, body.best_of or 1))
    kept = max_prompt_len(body.truncate_prompt_tokens, _max_tokens(body), max_model_len)
    prompts = await service.prompts.read_completion(body, max_model_len, kept)
    request_id = adopt_request_id(request, body.request_id)
    options = answer_options(body, request_id, model, service.assets, body.logprobs)
    echoes = [_echo(prompt, options.tokenizer) if body.echo else None for prompt in prompts]
    submission = Submission(
        request_id=options.request_id,
        arrival=arrival,
        jobs=_jobs(body, prompts, await service.grammars.read(body), service, max_model_len),
        options=output_options(body, is_prompt_only=body.max_tokens == 0),
        cache_salt=body.cache_salt or "",
        priority=priority_of(body, request),
        kv_transfer_params=leg_of(body),
    )
    await raise_if_gone(request)
    return CompletionAnswer(options, service.start(submission), prompts, echoes)


def _check(body: CompletionBody) -> None:
    refuse_unsupported(body)
    check_leg(body, len(body.prompt))
    num_generated = _num_generated(body)
    if num_generated < (body.n or 1):
        raise RequestError(f"best_of must be at least n, which is {body.n}, got {body.best_of}", param="best_of")
    if body.stream and num_generated > (body.n or 1):
        raise RequestError("best_of over n is not available when stream is true", param="best_of")


def _num_generated(body: CompletionBody) -> int:
    """Of which the best n are shown."""
    return body.best_of or body.n or 1


def _max_tokens(body: CompletionBody) -> int:
    """A node generates at least one token; with 0, and the prompt echoed, it is not shown."""
    if body.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    return 1 if body.max_tokens == 0 and body.echo else body.max_tokens


def _jobs(
    body: CompletionBody, prompts: list[Prompt], grammar: Grammar | None, service: Service, max_model_len: int
) -> list[Job]:
    is_ranked = _num_generated(body) > (body.n or 1)
    base = base_sampling(
        body,
        service.assets,
        logprobs=0 if body.logprobs is None and is_ranked else body.logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
        grammar=grammar,
    )
    asked = None if body.max_tokens is None else _max_tokens(body)
    jobs = []
    for prompt in prompts:
        budget = output_budget(asked, DEFAULT_MAX_TOKENS, len(prompt.token_ids), max_model_len)
        jobs += [Job(prompt=prompt, sampling=for_choice(base, index, budget)) for index in range(_num_generated(body))]
    return jobs


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    if prompt.text is not None:
        return prompt.text
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=True)


class CompletionAnswer(Answer):
    """Text completions: no role, and the prompt in front if `echo` is set."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(
        self, options: AnswerOptions, generation: Generation, prompts: Sequence[Prompt], echoes: Sequence[str | None]
    ) -> None:
        """`echoes`: None where the prompt is not to be echoed."""
        super().__init__(options, generation)
        self._prompts = prompts
        self._echoes = echoes
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._opened: set[int] = set()

    def opening_choices(self) -> list[dict[str, Any]]:
        """None: a choice opens with its first text, when its prompt's logprobs are known."""
        return []

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            self._opening_of(delta.index) + super(CompletionAnswer, self).events([delta])
            for delta in deltas
            if delta.shows
        )

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "text": delta.text, "logprobs": self._logprobs_of(delta)}

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        opening = self._opening_choice(whole.index)
        logprobs = _joined(opening["logprobs"], self._logprobs_of(whole))
        choice = opening | {"text": opening["text"] + whole.text, "logprobs": logprobs}
        prompt_logprobs = self._prompt_logprobs(self._generated_for(whole.index), self._prompt_of(whole.index))
        return choice if prompt_logprobs is None else choice | {"prompt_logprobs": prompt_logprobs}

    def chosen(self, wholes: list[Delta]) -> list[Delta]:
        """Of each prompt's the n whose tokens were likeliest on average, the best first."""
        shown, generated = self.options.num_per_prompt, self.options.num_generated_per_prompt
        if generated == shown:
            return wholes
        best: list[Delta] = []
        for start in range(0, len(wholes), generated):
            ranked = sorted(wholes[start : start + generated], key=_mean_logprob, reverse=True)
            best += ranked[:shown]
        return [replace(whole, index=index) for index, whole in enumerate(best)]

    def _opening_of(self, index: int) -> bytes:
        """A stream's first chunk of a choice, if there is anything in front of its text."""
        is_wanted = self.options.return_token_ids or self._echoes[index // self.options.num_per_prompt]
        if not is_wanted or index in self._opened:
            return b""
        is_first = not self._opened
        self._opened.add(index)
        return self._event([self._opening_choice(index)], num_output_tokens=0 if is_first else None)

    def _opening_choice(self, index: int) -> dict[str, Any]:
        echo = self._echoes[index // self.options.num_per_prompt]
        logprobs = None if echo is None else self._echoed_logprobs(index, echo)
        choice = {"index": index, "text": echo or "", "logprobs": logprobs, "finish_reason": None}
        if self.options.return_token_ids:
            choice["prompt_token_ids"] = self._prompt_of(index).token_ids
        return choice

    def _echoed_logprobs(self, index: int, echo: str) -> dict[str, Any] | None:
        logprobs = self._logprobs_for(index)
        if logprobs is None:
            return None
        pieces = self.generation.choices[self._generated_for(index)].prompt_logprobs
        return logprobs.add_prompt(self._prompt_of(index).token_ids, pieces, echo)

    def _prompt_of(self, index: int) -> Prompt:
        return self._prompts[index // self.options.num_per_prompt]

    def _generated_for(self, index: int) -> int:
        """A generated choice with the same prompt as the shown one `index`."""
        if self.options.num_generated_per_prompt == self.options.num_per_prompt:
            return index
        return index // self.options.num_per_prompt * self.options.num_generated_per_prompt

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        logprobs = self._logprobs_for(delta.index)
        return None if logprobs is None else logprobs.add(delta.tokens)

    def _logprobs_for(self, index: int) -> CompletionLogprobs | None:
        options = self.options
        if options.num_top_logprobs is None:
            return None
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(
                options.tokenizer, options.num_top_logprobs, skip_special_tokens=options.skip_special_tokens
            )
        return self._logprobs[index]


def _joined(prompt: dict[str, Any] | None, output: dict[str, Any] | None) -> dict[str, Any] | None:
    """The prompt's logprobs, then the output's."""
    if prompt is None or output is None:
        return output
    return {name: prompt[name] + output[name] for name in output}


def _mean_logprob(whole: Delta) -> float:
    """Tokens that only ended the text count, too."""
    logprobs = [token.logprob or 0.0 for token in whole.tokens]
    return sum(logprobs) / max(1, len(logprobs))
