"""POST /v1/chat/completions"""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.errors import RequestError
from server.answer import Answer, AnswerOptions
from server.choice import Delta
from server.generation import Generation
from server.kv_transfer import FIELD, check_leg, leg_of
from server.logprobs import chat_logprobs
from server.openapi import answers
from server.prompts import Prompt
from server.protocol import ChatBody, refuse_unsupported
from server.request_options import answer_options, output_options
from server.respond import raise_if_gone, respond
from server.response_schema import ChatCompletion, ChatCompletionChunk
from server.sampling import base_sampling, for_choice, output_budget
from server.service import Job, Service, Submission

EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 32}


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **answers(ChatCompletion, events=ChatCompletionChunk, example=EXAMPLE))
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        with service.released_on_failure(leg_of(body)):
            answer = await _start(body, request, service)
        return await respond(request, answer, stream=bool(body.stream))

    return router


async def _start(body: ChatBody, request: Request, service: Service) -> "ChatAnswer":
    arrival = time.monotonic()
    model = service.model_name(body.model)
    refuse_unsupported(body)
    check_leg(body)
    max_model_len = service.admit(body.n or 1)
    num_top = _num_top_logprobs(body)
    options = answer_options(body, request.state.request_id, model, service.assets.tokenizer, num_top)
    prompt = await _read(body, service, max_model_len)
    submission = Submission(
        request_id=options.request_id,
        arrival=arrival,
        jobs=_jobs(body, prompt, service, max_model_len),
        options=output_options(body),
        cache_salt=body.cache_salt or "",
        kv_transfer_params=leg_of(body),
    )
    await raise_if_gone(request)
    return ChatAnswer(options, service.start(submission), prompt)


async def _read(body: ChatBody, service: Service, max_model_len: int) -> Prompt:
    leg = body.kv_transfer_params
    if leg is not None and leg.is_leg and leg.prompt_token_ids is not None:
        return service.prompts.read_token_ids(leg.prompt_token_ids, f"{FIELD}.prompt_token_ids")
    return await service.prompts.read_chat(body.messages, body, max_model_len)


def _num_top_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _jobs(body: ChatBody, prompt: Prompt, service: Service, max_model_len: int) -> list[Job]:
    assets = service.assets
    base = base_sampling(body, assets.sampling_defaults, logprobs=_num_top_logprobs(body), vocab_size=assets.vocab_size)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    budget = output_budget(asked, None, len(prompt.token_ids), max_model_len)
    return [Job(prompt=prompt, sampling=for_choice(base, index, budget)) for index in range(body.n or 1)]


class ChatAnswer(Answer):
    """Chat completions: a stream opens with the role of each choice."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, generation: Generation, prompt: Prompt) -> None:
        super().__init__(options, generation)
        self._prompt = prompt

    def opening_choices(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for choice in self.generation.choices
        ]

    def prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt.token_ids} if self.options.return_token_ids else {}

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs_of(delta)}

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return {"index": whole.index, "message": message, "logprobs": self._logprobs_of(whole)}

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        num_top = self.options.num_top_logprobs
        return None if num_top is None else chat_logprobs(delta.tokens, self.options.tokenizer, num_top)
