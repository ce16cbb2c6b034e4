"""Refuses request bodies over the limit, by their announced length or as soon as more has arrived."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimitMiddleware:
    """The refusal is raised where the body is read, so it becomes an answer like any other error's."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            self._check(int(announced))
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, receive_limited, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body must not be longer than {self._max_bytes} bytes")
