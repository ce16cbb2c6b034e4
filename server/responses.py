"""POST /v1/responses: a chat whose answer is told in output items.

response.created, response.in_progress, the items' events (`responses_output`), then one of response.completed,
response.incomplete and response.failed
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.chat_start import StartedChat, start_chat
from server.choice import Delta
from server.kv_transfer import FIELD, leg_of, shown
from server.openapi import answers
from server.protocol import refuse_unsupported
from server.respond import respond
from server.responses_input import chat_of, own_names
from server.responses_output import Event, ResponseOutput
from server.responses_protocol import ResponsesBody, refuse_foreign
from server.responses_schema import ResponseEvent, ResponseObject
from server.service import Service
from server.tool_protocol import ToolChoice

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 32}
_TERMINAL = {"stop": "completed", "length": "incomplete"}


def responses_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", **answers(ResponseObject, events=ResponseEvent, example=EXAMPLE))
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        with service.released_on_failure(leg_of(body)):
            refuse_foreign(body)
            refuse_unsupported(body)
            with own_names():
                started = await start_chat(chat_of(body), request, service)
            reply = ResponsesReply(body, started, service.assets.sampling_defaults)
        return await respond(request, reply, stream=bool(body.stream))

    return router


class ResponsesReply:
    """A response, whole or as a stream of typed events."""

    def __init__(self, body: ResponsesBody, started: StartedChat, sampling_defaults: dict[str, float]) -> None:
        self.generation = started.generation
        self._choice = started.generation.choices[0]
        self._output = ResponseOutput()
        self._finish_reason: str | None = None
        self._sequence_number = 0
        self._fixed = _fixed_fields(body, started, sampling_defaults)

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._sent({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._sent(self._take(delta)) for delta in deltas)

    def closing(self) -> bytes:
        status = self._status()
        ending = list(self._output.end(status))
        return self._sent([*ending, {"type": f"response.{status}", "response": self._response(status)}])

    def failed(self, error: dict[str, Any]) -> bytes:
        code = "rate_limit_exceeded" if error["error"]["code"] == 429 else "server_error"
        failure = {"code": code, "message": error["error"]["message"]}
        return self._sent([{"type": "response.failed", "response": self._response("failed") | {"error": failure}}])

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._take(delta)
        status = self._status()
        _run(self._output.end(status))
        params = self._choice.kv_transfer_params
        transfer = {} if params is None else {FIELD: shown(params)}
        return orjson.dumps({**self._response(status), **transfer})

    def _take(self, delta: Delta) -> list[Event]:
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        pieces = delta.pieces or ([delta.text] if delta.text else [])
        return [event for piece in pieces for event in self._output.add(piece)]

    def _status(self) -> str:
        return _TERMINAL.get(self._finish_reason or "", "completed")

    def _sent(self, events: Iterable[Event]) -> bytes:
        sent = b""
        for event in events:
            numbered = {**event, "sequence_number": self._sequence_number}
            self._sequence_number += 1
            sent += b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(numbered) + b"\n\n"
        return sent

    def _response(self, status: str) -> dict[str, Any]:
        is_over = status != "in_progress"
        return {
            **self._fixed,
            "status": status,
            "output": self._output.shown(),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        return {
            "input_tokens": choice.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": choice.num_prompt_tokens + choice.num_tokens,
        }


def _run(events: Iterable[Event]) -> None:
    for _ in events:
        pass


def _fixed_fields(body: ResponsesBody, started: StartedChat, defaults: dict[str, float]) -> dict[str, Any]:
    """What a response says from its beginning to its end: mostly what the request said."""
    choice = body.tool_choice or ToolChoice("auto")
    text_format = body.text.format if body.text is not None else None
    return {
        "id": f"resp_{started.options.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": started.options.model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": {"type": "function", "name": choice.name} if choice.mode == "named" else choice.mode,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "truncation": "disabled",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
