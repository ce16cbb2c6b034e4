"""Gives every request an id and every response the header that tells it; reads the trace that a request belongs to."""

from collections.abc import Iterable
from uuid import uuid4

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
        request_id = request_id_of(scope["headers"])
        trace = trace_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        current_trace.set(trace)
        extra = [(HEADER, request_id.encode())]
        if trace is not None:
            extra.append((TRACEPARENT, trace.traceparent.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's if it can be used, else a new one."""
    given = dict(headers).get(HEADER, b"")
    if 0 < len(given) <= MAX_LENGTH and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode()
    return uuid4().hex
