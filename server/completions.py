"""POST /v1/completions"""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.errors import RequestError
from server.answer import Answer, AnswerOptions
from server.choice import Delta
from server.generation import Generation
from server.kv_transfer import check_leg, leg_of
from server.logprobs import CompletionLogprobs
from server.openapi import answers
from server.prompts import Prompt
from server.protocol import CompletionBody, refuse_unsupported
from server.request_options import answer_options, output_options
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
    max_model_len = service.admit(len(body.prompt) * (body.n or 1))
    prompts = await service.prompts.read_completion(body, max_model_len)
    options = answer_options(body, request.state.request_id, model, service.assets.tokenizer, body.logprobs)
    echoes = [_echo(prompt, options.tokenizer) if body.echo else "" for prompt in prompts]
    submission = Submission(
        request_id=options.request_id,
        arrival=arrival,
        jobs=_jobs(body, prompts, service, max_model_len),
        options=output_options(body),
        cache_salt=body.cache_salt or "",
        kv_transfer_params=leg_of(body),
    )
    await raise_if_gone(request)
    return CompletionAnswer(options, service.start(submission), prompts, echoes)


def _check(body: CompletionBody) -> None:
    refuse_unsupported(body)
    check_leg(body, len(body.prompt))
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of other than n is not supported by this server", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported by this server", param="echo")


def _jobs(body: CompletionBody, prompts: list[Prompt], service: Service, max_model_len: int) -> list[Job]:
    assets = service.assets
    base = base_sampling(body, assets.sampling_defaults, logprobs=body.logprobs, vocab_size=assets.vocab_size)
    jobs = []
    for prompt in prompts:
        budget = output_budget(body.max_tokens, DEFAULT_MAX_TOKENS, len(prompt.token_ids), max_model_len)
        jobs += [Job(prompt=prompt, sampling=for_choice(base, index, budget)) for index in range(body.n or 1)]
    return jobs


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    if prompt.text is not None:
        return prompt.text
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=True)


class CompletionAnswer(Answer):
    """Text completions: no role, and the prompt in front if `echo` is set."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(
        self, options: AnswerOptions, generation: Generation, prompts: Sequence[Prompt], echoes: Sequence[str]
    ) -> None:
        super().__init__(options, generation)
        self._prompts = prompts
        self._echoes = echoes
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening_choices(self) -> list[dict[str, Any]]:
        if not (self.options.return_token_ids or any(self._echoes)):
            return []
        return [self._opening_choice(choice.index) for choice in self.generation.choices]

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "text": delta.text, "logprobs": self._logprobs_of(delta)}

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        opening = self._opening_choice(whole.index)
        return opening | {"text": opening["text"] + whole.text, "logprobs": self._logprobs_of(whole)}

    def _opening_choice(self, index: int) -> dict[str, Any]:
        prompt_index = index // self.options.num_per_prompt
        choice = {"index": index, "text": self._echoes[prompt_index], "logprobs": None, "finish_reason": None}
        if self.options.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[prompt_index].token_ids
        return choice

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        num_top = self.options.num_top_logprobs
        if num_top is None:
            return None
        if delta.index not in self._logprobs:
            self._logprobs[delta.index] = CompletionLogprobs(self.options.tokenizer, num_top)
        return self._logprobs[delta.index].add(delta.tokens)
