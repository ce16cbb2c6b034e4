"""Gives every request an id and every response the header that tells it; reads the trace that a request belongs to."""

from collections.abc import Iterable
from uuid import uuid4

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.trace import TRACEPARENT, current_trace, trace_of

HEADER = b"x-request-id"
MAX_LENGTH = 128


class RequestIdMiddleware:
    """Takes the client's X-Request-Id if it is printable and short, else makes one. A valid `traceparent` is echoed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = given_id(scope["headers"])
        trace = trace_of(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"], state["has_given_id"] = given or uuid4().hex, given is not None
        current_trace.set(trace)
        extra = [] if trace is None else [(TRACEPARENT, trace.traceparent.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (HEADER, state["request_id"].encode())
                message["headers"] = [*message.get("headers", []), name, *extra]
            await send(message)

        await self._app(scope, receive, send_with_id)


def adopt_request_id(request: Request, in_body: str | None) -> str:
    """The id of this request: the header's, the body's, or the one that was made for it."""
    if in_body is not None and not request.state.has_given_id:
        request.state.request_id = in_body
    return str(request.state.request_id)


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The client's if it can be used."""
    given = dict(headers).get(HEADER, b"")
    is_usable = 0 < len(given) <= MAX_LENGTH and all(0x21 <= byte <= 0x7E for byte in given)
    return given.decode() if is_usable else None


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's if it can be used, else a new one."""
    return given_id(headers) or uuid4().hex
