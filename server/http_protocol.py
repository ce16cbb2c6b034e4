"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client may send before it is heard.

  connected, or first byte of the next request --> head --> body --> complete
  |                                                |                 |
  |   --max-header-bytes, MAX_NUM_HEADERS: 431 ----+                 |
  +---------------- --receive-timeout: 408 --------------------------+

A refusal here closes the connection: what else comes on it can no longer be told apart.
"""

import asyncio
from http import HTTPStatus
from typing import ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http_errors import error_body
from server.http_settings import LimitsConfig
from server.request_id import HEADER, request_id_of

MAX_NUM_HEADERS = 128


class _HeadTooLarge(Exception):
    """Raised through the parser, which then stops."""


class HttpProtocol(HttpToolsProtocol):
    """See `with_limits`."""

    limits: ClassVar[LimitsConfig]

    _num_head_bytes = 0
    _is_in_head = True
    _has_begun = False
    _deadline: asyncio.TimerHandle | None = None

    @classmethod
    def with_limits(cls, limits: LimitsConfig) -> type["HttpProtocol"]:
        """uvicorn makes the instances and knows nothing of limits."""
        return type("LimitedHttpProtocol", (cls,), {"limits": limits})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_begun and self._is_in_head and not self.transport.is_closing():
            # What the parser keeps of a header that has not ended yet.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(431)

    # Called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun, self._is_in_head, self._num_head_bytes = True, True, 0
        if self._deadline is None:
            self._set_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_begun, self._is_in_head = False, True
        self._clear_deadline()

    def send_400_response(self, msg: str) -> None:
        self._refuse(431 if self._is_head_too_large() else 400)

    # Limits

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._is_head_too_large():
            raise _HeadTooLarge

    def _is_head_too_large(self) -> bool:
        return self._num_head_bytes > self.limits.max_header_bytes or len(self.headers or ()) > MAX_NUM_HEADERS

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receive_timeout, self._timed_out)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _timed_out(self) -> None:
        if self.flow.read_paused:
            # It is we who do not read.
            self._set_deadline()
        elif self._has_begun:
            self._refuse(408)
        else:
            self.transport.close()

    def _refuse(self, status: int) -> None:
        if not self._would_mix_answers():
            self.transport.write(self._answer(status))
        self.transport.close()

    def _would_mix_answers(self) -> bool:
        """Whether another response is under way, or this request's own has begun."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._is_in_head or bool(self.pipeline) or self.cycle.response_started

    def _answer(self, status: int) -> bytes:
        message = {
            400: "this is no HTTP request",
            408: f"the request did not arrive within {self.limits.receive_timeout:g} s",
            431: f"the request line and the headers must not be longer than {self.limits.max_header_bytes} bytes, nor "
            f"more than {MAX_NUM_HEADERS}",
        }[status]
        body = orjson.dumps(error_body(status, message))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (HEADER, request_id_of(self.headers or []).encode()),
        ]
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), *(b": ".join(pair) for pair in headers)]
        return b"\r\n".join([*lines, b"", body])
