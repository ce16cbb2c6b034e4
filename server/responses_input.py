"""A body of /v1/responses as the chat that it stands for, and chat's complaints in this endpoint's words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.errors import RequestError
from server.protocol import ChatBody, ChatMessage, GenerationBody
from server.responses_protocol import (
    FlatToolBody,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ResponsesBody,
    TextOptions,
)
from server.tool_protocol import CalledFunction, FunctionBody, ToolBody, ToolCallBody

_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
_NOT_SHARED = ("stream_options", "max_tokens")


def chat_of(body: ResponsesBody) -> ChatBody:
    """Raises `RequestError` or `RequestValidationError`."""
    shared = {name: getattr(body, name) for name in GenerationBody.model_fields if name not in _NOT_SHARED}
    fields: dict[str, Any] = {
        **shared,
        "max_completion_tokens": body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
        "messages": list(_messages(body)),
        "tools": [_nested(tool) for tool in body.tools or ()],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        **_response_format(body.text or TextOptions()),
    }
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([_own_complaint(complaint) for complaint in error.errors()]) from error


def _own_complaint(complaint: Any) -> dict[str, Any]:
    """About `response_format`, which is flatter here. All else has been checked under its own name."""
    path = [step for step in complaint["loc"] if step not in ("response_format", "json_schema")]
    return {**complaint, "loc": ("text", "format", *path)}


@contextmanager
def own_names() -> Iterator[None]:
    """Errors of chat name the fields that this endpoint has instead."""
    try:
        yield
    except RequestError as error:
        name = (error.param or "").partition(".")[0]
        if name not in _NAMES:
            raise
        raise RequestError(str(error).replace(name, _NAMES[name]), param=_NAMES[name]) from error


def _messages(body: ResponsesBody) -> Iterator[ChatMessage]:
    """Neighbouring calls, and the text before them, are one turn of the assistant."""
    if body.instructions:
        yield ChatMessage(role="system", content=body.instructions)
    turn: ChatMessage | None = None
    for item in body.input:
        message = _message(item)
        if turn is not None and turn.role == "assistant" and isinstance(item, FunctionCallItem):
            turn.tool_calls = [*(turn.tool_calls or ()), *(message.tool_calls or ())]
            continue
        if turn is not None:
            yield turn
        turn = message
    if turn is not None:
        yield turn


def _message(item: MessageItem | FunctionCallItem | FunctionCallOutputItem) -> ChatMessage:
    match item:
        case MessageItem():
            return ChatMessage(role=item.role, content=item.content)
        case FunctionCallItem():
            function = CalledFunction(name=item.name, arguments=item.arguments)
            return ChatMessage(role="assistant", tool_calls=[ToolCallBody(id=item.call_id, function=function)])
        case FunctionCallOutputItem():
            return ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id)


def _nested(tool: FlatToolBody) -> ToolBody:
    return ToolBody(type="function", function=FunctionBody(**tool.model_dump(exclude={"type"})))


def _response_format(text: TextOptions) -> dict[str, Any]:
    match text.format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema"}:
            schema = {name: value for name, value in text.format.items() if name != "type"}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    rule = "text.format.type must be text, json_object or json_schema"
    raise RequestError(rule, param="text.format.type")
