"""The client against a socket that says what the test wants, byte by byte."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest

from loadtest.client import Client, Target, first_model, open_session
from loadtest.errors import ServerError
from loadtest.record import UNFINISHED, Record

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}

Step = bytes | asyncio.Event


class RawServer:
    """Answers each request with `steps`: bytes are sent, an event is waited for; then it hangs up."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.requests: list[tuple[str, bytes]] = []
        self.url = ""

    async def __aenter__(self) -> "RawServer":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        self.requests.append((head, await reader.readexactly(length)))
        for step in self.steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            else:
                await step.wait()
        writer.close()


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(piece: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": reason}])


DONE = b"data: [DONE]\n\n"
GOOD = HEAD + text("a") + text("b") + text("", "length") + event(choices=[], usage=USAGE) + DONE


def make_record() -> Record:
    return Record(kind="chat", conversation=0, turn=0, intended=0.0)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))


def complete(*steps: Step, chat: bool = False, **target: Any) -> tuple[Record, str, RawServer]:
    found: list[Any] = []

    async def main() -> None:
        ticks = count()
        async with RawServer(*steps) as server, open_session("key") as session:
            client = Client(
                session, Target(base_url=server.url, model="m", chat=chat, **target), lambda: float(next(ticks))
            )
            record = make_record()
            answer = await client.complete(client.prepare([{"role": "user", "content": "hi"}], 3), record)
            found.extend([record, answer, server])

    run(main)
    return found[0], found[1], found[2]


def test_a_whole_answer() -> None:
    record, answer, server = complete(GOOD)
    assert record.completed
    assert answer == "ab"
    assert record.status == 200
    assert record.finish_reason == "length"
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 3, 4)
    # The server counts three tokens where two events had text: the empty last one bore the third.
    assert len(record.token_times) == 3
    ((head, body),) = server.requests
    assert head.startswith("POST /v1/completions HTTP/1.1")
    assert "authorization: bearer key" in head.lower()
    assert json.loads(body) == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_without_the_fields_that_only_some_servers_know() -> None:
    record, _, server = complete(GOOD, chat=True, exact_output=False, timings=True, fields={"temperature": 1, "x": 2})
    assert record.completed
    ((head, body),) = server.requests
    assert head.startswith("POST /v1/chat/completions")
    sent = json.loads(body)
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert not {"min_tokens", "ignore_eos", "prompt"} & sent.keys()
    assert (sent["timings"], sent["temperature"], sent["x"]) == (True, 1, 2)


def test_tokens_are_stamped_when_their_bytes_arrive() -> None:
    """The server holds each event back until the one before was seen: stamps are ordered by that, not by a clock."""

    async def main() -> None:
        gates = [asyncio.Event(), asyncio.Event()]
        steps = [HEAD + text("a"), gates[0], text("b")[:9], gates[1], text("b")[9:] + text("c", "length") + DONE]
        async with RawServer(*steps) as server, open_session(None) as session:
            now = 1.0
            client = Client(session, Target(base_url=server.url, model="m", chat=False), lambda: now)
            record = make_record()
            task = asyncio.create_task(client.complete(b"{}", record))
            while not record.token_times:
                await asyncio.sleep(0)
            now = 2.0
            gates[0].set()
            gates[1].set()
            assert await task == "abc"
            assert record.sent == 1.0
            assert record.token_times == [1.0, 2.0, 2.0]
            assert record.done == 2.0

    run(main)


@pytest.mark.parametrize(
    ("steps", "kind", "message"),
    [
        ([b"HTTP/1.1 429 Busy\r\ncontent-length: 5\r\n\r\nlater"], "http_429", "later"),
        ([b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"], "http_500", ""),
        ([HEAD + text("a") + event(error={"message": "node died"}) + DONE], "stream_error", "node died"),
        ([HEAD + text("a")], "truncated", "DONE"),
        ([HEAD + b"data: {nonsense\n\n" + DONE], "bad_event", "nonsense"),
        ([HEAD + b'data: {"choices": [3]}\n\n' + DONE], "bad_event", "choices"),
        ([HEAD.replace(b"connection: close", b"content-length: 999") + text("a")], "disconnect", ""),
        ([b""], "disconnect", ""),
        ([b"nonsense\r\n\r\n"], "disconnect", ""),
    ],
)
def test_what_goes_wrong_is_told_apart(steps: list[Step], kind: str, message: str) -> None:
    record, _, _ = complete(*steps)
    assert record.error_kind == kind
    assert message in (record.error or "")
    assert record.failed
    assert not record.completed


def test_no_server_no_end_and_a_test_that_ends() -> None:
    async def main() -> None:
        never = asyncio.Event()
        async with RawServer(HEAD + text("a"), never) as server, open_session(None) as session:
            late, cut = make_record(), make_record()
            target = Target(base_url=server.url, model="m", chat=False, timeout=0.05)
            await Client(session, target, lambda: 0.0).complete(b"{}", late)
            assert late.error_kind == "timeout"
            task = asyncio.create_task(
                Client(session, Target(base_url=server.url, model="m", chat=False), lambda: 0.0).complete(b"{}", cut)
            )
            while not cut.token_times:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (cut.error_kind, cut.failed, cut.completed) == (UNFINISHED, False, False)
            never.set()
            url = server.url
        async with open_session(None) as session:
            record = make_record()
            await Client(session, Target(base_url=url, model="m", chat=False), lambda: 0.0).complete(b"{}", record)
            assert record.error_kind == "connect"
            with pytest.raises(ServerError, match="v1/models"):
                await first_model(session, url)

    run(main)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b'{"data": [{"id": "one"}, {"id": "two"}]}', "one"),
        (b'{"data": []}', None),
        (b"nonsense", None),
    ],
)
def test_the_first_model_of_the_list(answer: bytes, found: str | None) -> None:
    async def main() -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n".encode()
        async with RawServer(head + answer) as server, open_session(None) as session:
            if found is not None:
                assert await first_model(session, server.url + "/") == found
            else:
                with pytest.raises(ServerError, match="--model"):
                    await first_model(session, server.url)

    run(main)
