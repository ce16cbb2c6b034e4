"""The least that can stand between a client and the scripted engine: the same link, the same HTTP library and bytes.

It does none of the server's work: no templates or tokenizing, no routing, no detokenizing, no metrics, no deadlines,
and clients that leave are not noticed.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from connector.codec import PROTOCOL_VERSION, encode
from connector.link import LinkHandler
from connector.server_messages import Generate, ServerHello, TokenOutput, Tokens, decode_from_node
from connector.zmq_link import ZmqLinks
from engine.sampling_params import SamplingParams
from server.tokenizer import Tokenizer

MODEL_NAME = "bench"
DONE = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class _Stream:
    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.outputs: list[TokenOutput] = []


class BareServer(LinkHandler):
    """An ASGI application that answers any POST with one stream."""

    def __init__(self, address: str, directory: Path, token_ids: Sequence[int]) -> None:
        self._tokenizer = Tokenizer.from_directory(directory)
        self._events = {token_id: self._event(token_id, None) for token_id in token_ids}
        self._last = self._event(token_ids[-1], "length")
        self._opening = self._chunk({"role": "assistant", "content": ""}, None)
        self._streams: dict[str, _Stream] = {}
        self._links = ZmqLinks("bare")
        self._endpoint = self._links.dial(address, self)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self._loop = asyncio.get_running_loop()
        if scope["method"] == "POST":
            await receive()
            await self._answer(dict(scope["headers"])[b"x-request-id"].decode(), send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

    async def _answer(self, name: str, send: Any) -> None:
        stream = self._streams[f"{name}-x-0"] = _Stream()
        message = Generate(request_id=f"{name}-x-0", prompt_token_ids=[1] * 32, sampling=SamplingParams())
        self._endpoint.send([encode(message)])
        await stream.arrived.wait()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        pending, is_over = self._opening, False
        while not is_over:
            await stream.arrived.wait()
            stream.arrived.clear()
            outputs, stream.outputs = stream.outputs, []
            is_over = outputs[-1].finish_reason is not None
            pending += b"".join(self._bytes_of(output) for output in outputs)
            await send({"type": "http.response.body", "body": pending, "more_body": True})
            pending = b""
        await send({"type": "http.response.body", "body": DONE})

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        message = decode_from_node.decode(frames[0])
        if isinstance(message, Tokens):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, message.outputs)

    def on_up(self, peer: bytes) -> None:
        self._endpoint.send([encode(ServerHello(protocol_version=PROTOCOL_VERSION))])

    def on_down(self, peer: bytes) -> None: ...

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            is_over = output.finish_reason is not None
            stream = self._streams.pop(output.request_id) if is_over else self._streams[output.request_id]
            stream.outputs.append(output)
            stream.arrived.set()

    def _bytes_of(self, output: TokenOutput) -> bytes:
        return self._last if output.finish_reason is not None else self._events[output.tokens[0].token_id]

    def _event(self, token_id: int, finish_reason: str | None) -> bytes:
        return self._chunk({"content": self._tokenizer.token_text(token_id)}, finish_reason)

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = None
        header = {"id": "chatcmpl-b1000", "object": "chat.completion.chunk", "created": 1_800_000_000}
        return b"data: " + orjson.dumps({**header, "model": MODEL_NAME, "choices": [choice]}) + b"\n\n"


def serve(port: int, address: str, directory: Path, token_ids: Sequence[int]) -> None:
    """Runs until it is killed."""
    app = BareServer(address, directory, token_ids)
    uvicorn.run(app, host="127.0.0.1", port=port, log_config=None, access_log=False, lifespan="off")
