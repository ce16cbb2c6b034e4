"""Streaming clients that cost little: each has one connection, and notes when every event came and nothing else."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import orjson

ANSWER_TIMEOUT = 60.0
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Arrival:
    """One answer, on this host's monotonic clock. The first event is the opening, the last is [DONE]."""

    request_id: str
    sent: float
    events: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._arrival = Arrival("", 0.0)
        self._over: asyncio.Future[Arrival] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        text = self._tail + data
        self._arrival.events += [now] * text.count(b"\n\n")
        self._tail = b"\n" if text.endswith(b"}\n") else b""
        if text.endswith(_LAST_CHUNK):
            assert self._over is not None
            self._over.set_result(self._arrival)

    async def ask(self, request: Callable[[str], bytes], request_id: str) -> Arrival:
        assert self._transport is not None
        self._over = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._arrival = Arrival(request_id, time.monotonic())
        self._transport.write(request(request_id))
        return await asyncio.wait_for(self._over, ANSWER_TIMEOUT)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


class Clients:
    """`num_clients` of them, each asking `num_requests` times, one after the other."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        self._port = port
        self._numbers = count(1000)
        content = orjson.dumps(body)
        self._head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._head += f"content-length: {len(content)}\r\nx-request-id: "
        self._rest = b"\r\n\r\n" + content

    async def run(self, num_clients: int, num_requests: int) -> list[Arrival]:
        answers = await asyncio.gather(*(self._ask_often(num_requests) for _ in range(num_clients)))
        return [arrival for one in answers for arrival in one]

    async def _ask_often(self, num_requests: int) -> list[Arrival]:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        try:
            return [await connection.ask(self._request, f"b{next(self._numbers)}") for _ in range(num_requests)]
        finally:
            connection.close()

    def _request(self, request_id: str) -> bytes:
        return self._head.encode() + request_id.encode() + self._rest
