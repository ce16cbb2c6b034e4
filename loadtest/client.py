"""The HTTP side: streams one completion after another from one server, and notes when bytes arrive."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from loadtest.chunk import DONE, Chunk, read_chunk
from loadtest.errors import ServerError
from loadtest.record import UNFINISHED, Record
from loadtest.sse import EventParser

CONNECT_TIMEOUT = 10.0
_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server, and what every request to it has in common."""

    base_url: str
    model: str
    chat: bool
    exact_output: bool = True
    timings: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    timeout: float = 300.0

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, messages: list[dict[str, str]], num_output_tokens: int) -> bytes:
        """Encoded before the request is stamped as sent."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(message["content"] for message in messages)
        if self.exact_output:
            body |= {"ignore_eos": True, "min_tokens": num_output_tokens}
        if self.timings:
            body["timings"] = True
        return orjson.dumps(body | self.fields)


class Client:
    """Connections to one server. `complete` never raises for what the server does: the record tells."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Callable[[], float]) -> None:
        self.target = target
        self._session = session
        self._clock = clock

    def prepare(self, messages: list[dict[str, str]], num_output_tokens: int) -> bytes:
        return self.target.body(messages, num_output_tokens)

    async def complete(self, body: bytes, record: Record) -> str:
        """Sends `body`, fills `record`, returns the text."""
        texts: list[str] = []
        record.sent = self._clock()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._stream(body, record, texts)
        except TimeoutError:
            record.fail("timeout", f"no end within {self.target.timeout} s")
        except aiohttp.ClientConnectorError as error:
            record.fail("connect", str(error))
        except aiohttp.ClientError as error:
            record.fail("disconnect", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            record.fail(UNFINISHED, "cut off when the test ended")
            raise
        return "".join(texts)

    async def _stream(self, body: bytes, record: Record, texts: list[str]) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post(self.target.url, data=body, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                message = (await response.content.read(2000)).decode(errors="replace")
                record.fail(f"http_{response.status}", message)
                return
            await self._read(response, record, texts)

    async def _read(self, response: aiohttp.ClientResponse, record: Record, texts: list[str]) -> None:
        parser = EventParser()
        last_maybe: float | None = None
        is_over = False
        async for piece in response.content.iter_any():
            now = self._clock()
            for data in parser.feed(piece):
                if data == DONE:
                    is_over = True
                    continue
                chunk = _read_or_fail(data, record)
                texts.append(chunk.text)
                _note(chunk, record, now)
                if chunk.may_bear_token:
                    last_maybe = now
        record.done = self._clock()
        if last_maybe is not None and len(record.token_times) < (record.completion_tokens or 0):
            record.token_times.append(last_maybe)
        if not is_over:
            record.fail("truncated", "the stream ended without [DONE]")


def _read_or_fail(data: bytes, record: Record) -> Chunk:
    try:
        return read_chunk(data)
    except (ValueError, AttributeError, TypeError) as error:
        record.fail("bad_event", f"{error}: {data[:100]!r}")
        return Chunk()


def _note(chunk: Chunk, record: Record, now: float) -> None:
    if chunk.bears_token:
        record.token_times.append(now)
    record.finish_reason = chunk.finish_reason or record.finish_reason
    record.timings |= chunk.timings
    if chunk.error is not None:
        record.fail("stream_error", chunk.error)
    if chunk.usage:
        record.prompt_tokens = chunk.usage.get("prompt_tokens")
        record.completion_tokens = chunk.usage.get("completion_tokens")
        record.cached_tokens = (chunk.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@asynccontextmanager
async def open_session(api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as requests need; none is limited, compressed, or sent through a proxy."""
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context())
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=_READ_BUFFER_BYTES
    ) as session:
        yield session


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first of /v1/models. Raises `ServerError` if there is none to be had."""
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=CONNECT_TIMEOUT)) as response:
            if response.status != 200:
                raise ServerError(f"{url}: HTTP {response.status}: {(await response.text())[:200]}")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"{url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{url}: no list of models; name one with --model") from error
