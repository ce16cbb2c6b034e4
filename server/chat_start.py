"""From a conversation to its running generation: what every endpoint that takes one shares."""

import time
from dataclasses import dataclass

from fastapi import Request

from engine.errors import RequestError
from engine.grammar import Grammar
from server.answer import AnswerOptions
from server.generation import Generation
from server.kv_transfer import FIELD, check_leg, leg_of
from server.prompts import Prompt, max_prompt_len
from server.protocol import ChatBody, refuse_unsupported
from server.request_id import adopt_request_id
from server.request_options import answer_options, output_options, priority_of
from server.respond import raise_if_gone
from server.sampling import base_sampling, for_choice, output_budget
from server.service import Job, Service, Submission
from server.tools import ToolReading, tool_use_of


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A conversation whose answer is being generated."""

    body: ChatBody
    options: AnswerOptions
    prompt: Prompt
    generation: Generation


async def start_chat(body: ChatBody, request: Request, service: Service) -> StartedChat:
    """Raises `RequestError` or `ServingError` with nothing sent. The generation is the caller's to close."""
    arrival = time.monotonic()
    model = service.model_name(body.model)
    refuse_unsupported(body)
    check_leg(body)
    max_model_len = service.admit(body.n or 1)
    tools = _tool_reading(body, service)
    request_id = adopt_request_id(request, body.request_id)
    options = answer_options(body, request_id, model, service.assets, _num_top_logprobs(body))
    grammar = await _grammar(body, tools, service)
    prompt = await _read(body, service, max_model_len)
    submission = Submission(
        request_id=options.request_id,
        arrival=arrival,
        jobs=_jobs(body, prompt, grammar, service, max_model_len),
        options=output_options(body, tools),
        cache_salt=body.cache_salt or "",
        priority=priority_of(body, request),
        kv_transfer_params=leg_of(body),
    )
    await raise_if_gone(request)
    return StartedChat(body, options, prompt, service.start(submission))


def _tool_reading(body: ChatBody, service: Service) -> ToolReading | None:
    use = tool_use_of(body)
    return None if use is None else ToolReading(use, service.assets.tool_parser, service.assets.tool_marker_ids)


async def _read(body: ChatBody, service: Service, max_model_len: int) -> Prompt:
    leg = body.kv_transfer_params
    if leg is not None and leg.is_leg and leg.prompt_token_ids is not None:
        return service.prompts.read_token_ids(leg.prompt_token_ids, f"{FIELD}.prompt_token_ids", max_model_len)
    kept = max_prompt_len(body.truncate_prompt_tokens, _max_tokens(body), max_model_len)
    return await service.prompts.read_chat(body.messages, body, max_model_len, kept)


def _num_top_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatBody) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


async def _grammar(body: ChatBody, tools: ToolReading | None, service: Service) -> Grammar | None:
    grammar = await service.grammars.read(body)
    schema = tools.use.output_schema() if tools is not None else None
    if schema is None:
        return grammar
    if grammar is not None:
        raise RequestError("a tool_choice that forces calls leaves no other shape for the output", param="tool_choice")
    return await service.grammars.read_schema(schema, "tools")


def _jobs(body: ChatBody, prompt: Prompt, grammar: Grammar | None, service: Service, max_model_len: int) -> list[Job]:
    base = base_sampling(
        body,
        service.assets,
        logprobs=_num_top_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    budget = output_budget(_max_tokens(body), None, len(prompt.token_ids), max_model_len, prompt_param="messages")
    return [Job(prompt=prompt, sampling=for_choice(base, index, budget)) for index in range(body.n or 1)]
