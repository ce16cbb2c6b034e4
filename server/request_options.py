"""What both endpoints read from a body besides prompt and sampling."""

from engine.errors import RequestError
from server.answer import AnswerOptions
from server.choice import OutputOptions
from server.model_assets import ModelAssets
from server.protocol import GenerationBody, StreamOptions
from server.tools import ToolReading


def output_options(body: GenerationBody, tools: ToolReading | None = None) -> OutputOptions:
    return OutputOptions(
        stop=tuple(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
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
    """Raises `RequestError` for stream options of a request that does not stream."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    stream_options = body.stream_options or StreamOptions()
    return AnswerOptions(
        request_id=request_id,
        model=model,
        tokenizer=assets.tokenizer,
        fingerprint=assets.fingerprint,
        num_per_prompt=body.n or 1,
        num_top_logprobs=num_top_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.include_usage and stream_options.continuous_usage_stats),
    )
