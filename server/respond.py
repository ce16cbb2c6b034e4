"""From a running generation to an HTTP response, streamed or whole.

A streamed response starts with the first output, so that what fails before it still gets its own HTTP status.
"""

import asyncio
import logging

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from engine.errors import RequestError, ServingError
from server.choice import Delta
from server.disconnect import on_disconnect
from server.generation import ClientGone, Generation
from server.http_errors import failure_body
from server.reply import Reply

logger = logging.getLogger(__name__)


async def raise_if_gone(request: Request) -> None:
    """Raises `ClientGone` if the client left while its prompt was read: no node need hear of the request."""
    events: list[ClientGone] = []
    async with on_disconnect(request.receive, lambda: events.append(ClientGone())):
        await asyncio.sleep(0)
    if events:
        raise events[0]


async def respond(request: Request, answer: Reply, *, stream: bool) -> Response:
    """Raises `ServingError`, `RequestError` or `ClientGone` if the request ends before anything was sent."""
    first = await _first_deltas(request, answer.generation)
    if stream:
        return EventStream(answer, first)
    with answer.generation as generation:
        async with on_disconnect(request.receive, lambda: generation.abort(ClientGone())):
            deltas = list(first)
            while more := await generation.next_deltas():
                deltas += more
    if any(choice.prompt_logprobs for choice in answer.generation.choices):
        # Twenty entries for each token of a long prompt: other requests' tokens go on meanwhile.
        content = await asyncio.to_thread(answer.whole, deltas)
    else:
        content = answer.whole(deltas)
    return Response(content, media_type="application/json")


async def _first_deltas(request: Request, generation: Generation) -> list[Delta]:
    try:
        async with on_disconnect(request.receive, lambda: generation.abort(ClientGone())):
            return await generation.next_deltas()
    except BaseException:
        generation.close()
        raise


class EventStream(Response):
    """Server-sent events. Owns the generation from here on."""

    media_type = "text/event-stream"

    def __init__(self, answer: Reply, first: list[Delta]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer.generation as generation:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with on_disconnect(receive, lambda: generation.abort(ClientGone())):
                closing = await self._send_events(send)
            await send({"type": "http.response.body", "body": closing, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Everything up to the last piece, which is returned."""
        answer, deltas = self._answer, self._first
        pending = answer.opening()
        try:
            while deltas:
                pending += answer.events(deltas)
                if pending:
                    await send({"type": "http.response.body", "body": pending, "more_body": True})
                pending = b""
                deltas = await answer.generation.next_deltas()
        except (ServingError, RequestError) as error:
            return answer.failed(failure_body(error))
        except ClientGone:
            logger.info("client left in mid-stream")
            return b""
        return answer.closing()
