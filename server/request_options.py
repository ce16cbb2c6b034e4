"""What both endpoints read from a request besides prompt and sampling."""

import re

from fastapi import Request

from engine.errors import RequestError
from server.answer import AnswerOptions
from server.choice import OutputOptions
from server.model_assets import ModelAssets
from server.protocol import GenerationBody, StreamOptions
from server.tools import ToolReading

_INTEGER = re.compile("[+-]?[0-9]{1,10}")

PRIORITY_HEADER = "X-Vllm-Priority"


def priority_of(body: GenerationBody, request: Request) -> int:
    """Lower goes first. The header comes before the body. Raises `RequestError` for one that is no integer."""
    given = request.headers.get(PRIORITY_HEADER)
    if given is None:
        return body.priority or 0
    if not _INTEGER.fullmatch(given) or not -(2**31) <= int(given) < 2**31:
        raise RequestError(f"{PRIORITY_HEADER} must be an integer of 32 bits", param=PRIORITY_HEADER)
    return int(given)


def output_options(
    body: GenerationBody, tools: ToolReading | None = None, *, is_prompt_only: bool = False
) -> OutputOptions:
    return OutputOptions(
        stop=tuple(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        is_prompt_only=is_prompt_only,
        make_tool_parser=None if tools is None else tools.make_parser,
        shown_special_ids=frozenset() if tools is None else tools.marker_ids,
    )


def answer_options(
    body: GenerationBody,
    request_id: str,
    model: str,
    assets: ModelAssets,
    num_top_logprobs: int | None,
) -> AnswerOptions:
    """Raises `RequestError` for what a stream, or only a stream, can have."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available when stream is true", param="prompt_logprobs")
    stream_options = body.stream_options or StreamOptions()
    return AnswerOptions(
        request_id=request_id,
        model=model,
        tokenizer=assets.tokenizer,
        fingerprint=assets.fingerprint,
        num_per_prompt=body.n or 1,
        num_generated_per_prompt=getattr(body, "best_of", None) or body.n or 1,
        num_top_logprobs=num_top_logprobs,
        num_top_prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.include_usage and stream_options.continuous_usage_stats),
    )
