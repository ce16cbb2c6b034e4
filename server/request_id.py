"""Gives every request an id and every response the header that tells it."""

from uuid import uuid4

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
        request_id = _request_id(dict(scope["headers"]).get(HEADER, b""))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (HEADER, request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(given: bytes) -> str:
    if 0 < len(given) <= MAX_LENGTH and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode()
    return uuid4().hex
