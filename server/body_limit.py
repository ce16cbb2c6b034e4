"""Refuses request bodies that are too long, or would take too long to read: one request must not hold up the others.

A body's length is known before it is read or as soon as more has arrived. The work that it makes is that of its values,
each of which becomes an object; one that holds text takes no longer for being long.
"""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_VALUES = 1 << 20
"""Token ids of a million-token prompt, or of a large batch. Reading as many holds up the event loop for 0.1 s."""


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
        num_bytes = num_commas = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes, num_commas
            self._check(int(announced), 0)
            message = await receive()
            part = message.get("body", b"")
            num_bytes += len(part)
            # Those within texts count, too: that much text has more tokens than commas.
            num_commas += part.count(b",")
            self._check(num_bytes, num_commas)
            return message

        await self._app(scope, receive_limited, send)

    def _check(self, num_bytes: int, num_commas: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body must not be longer than {self._max_bytes} bytes")
        if num_commas >= MAX_VALUES:
            raise HTTPException(413, f"the body must not hold more than {MAX_VALUES} values")
