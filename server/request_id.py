"""Gives every request an id and every response the header that tells it."""

from uuid import uuid4

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_LENGTH = 128


class RequestIdMiddleware:
    """Takes the client's X-Request-Id if it is printable and short, else makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _given_id(dict(scope["headers"]).get(HEADER, b""))
        state = scope.setdefault("state", {})
        state["request_id"], state["has_given_id"] = given or uuid4().hex, given is not None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (HEADER, state["request_id"].encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def adopt_request_id(request: Request, in_body: str | None) -> str:
    """The id of this request: the header's, the body's, or the one that was made for it."""
    if in_body is not None and not request.state.has_given_id:
        request.state.request_id = in_body
    return str(request.state.request_id)


def _given_id(given: bytes) -> str | None:
    is_usable = 0 < len(given) <= MAX_LENGTH and all(0x21 <= byte <= 0x7E for byte in given)
    return given.decode() if is_usable else None
