"""The runner in virtual time: every delay is chosen, every figure is exact."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat
from typing import Any

import pytest

from loadtest import arrivals
from loadtest.conversation import Conversation, Turn
from loadtest.record import UNFINISHED, Record
from loadtest.runner import BACK_OFF, Round, Runner
from loadtest.summary import throughput
from loadtest.workloads import Flow
from tests.virtual_time import run_in_virtual_time


class ScriptedSender:
    """A server that answers `num_tokens` after `ttft`, and a token each `itl` from there; `serial`: one by one."""

    def __init__(self, *, ttft: float = 1.0, itl: float = 0.5, serial: bool = False) -> None:
        self.ttft, self.itl = ttft, itl
        self.lock = asyncio.Lock() if serial else None
        self.prepared: list[list[dict[str, str]]] = []
        self.most, self.open = 0, 0
        self.fails: Callable[[Record], bool] = lambda record: False

    def prepare(self, messages: list[dict[str, str]], num_output_tokens: int) -> bytes:
        self.prepared.append([dict(message) for message in messages])
        return str(num_output_tokens).encode()

    async def complete(self, body: bytes, record: Record) -> str:
        clock = asyncio.get_running_loop().time
        record.sent = clock()
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.lock is None:
                await self._answer(int(body), record, clock)
            else:
                async with self.lock:
                    await self._answer(int(body), record, clock)
        except asyncio.CancelledError:
            record.fail(UNFINISHED, "cut off")
            raise
        finally:
            self.open -= 1
        return f"answer {len(self.prepared)}"

    async def _answer(self, num_tokens: int, record: Record, clock: Callable[[], float]) -> None:
        if self.fails(record):
            record.fail("http_500", "scripted")
            return
        for number in range(num_tokens):
            await asyncio.sleep(self.itl if number else self.ttft)
            record.token_times.append(clock())
        record.done = clock()


def single(kind: str = "chat", num_output_tokens: int = 3) -> Iterator[Conversation]:
    turn = Turn(text="hello", num_output_tokens=num_output_tokens)
    return (Conversation(kind=kind, turns=(turn,)) for _ in count())


def run(
    *flows: Flow, duration: float | None = None, drain: float = 100.0, interrupt_at: float | None = None, **sender: Any
) -> tuple[Round, ScriptedSender]:
    async def main() -> tuple[Round, ScriptedSender]:
        loop = asyncio.get_running_loop()
        scripted = ScriptedSender(**{name: value for name, value in sender.items() if name != "fails"})
        scripted.fails = sender.get("fails", scripted.fails)
        runner = Runner(scripted, loop.time, drain=drain)
        if interrupt_at is not None:
            loop.call_later(interrupt_at, runner.interrupt)
        return await runner.run(flows, duration), scripted

    return run_in_virtual_time(main())


def test_a_closed_loop_keeps_its_concurrency_and_starts_the_next_when_one_ends() -> None:
    one, sender = run(Flow(conversations=islice(single(), 6), concurrency=2))
    assert sender.most == 2
    assert [record.intended for record in one.records] == [0, 0, 2, 2, 4, 4]
    assert {record.ttft for record in one.records} == {1.0}
    assert {record.tpot for record in one.records} == {0.5}
    assert {record.e2el for record in one.records} == {2.0}
    assert one.ended == 6.0
    assert throughput(one)["output_throughput"] == 18 / 6


def test_an_open_loop_starts_when_due_whatever_became_of_the_requests_before() -> None:
    one, sender = run(Flow(conversations=islice(single(), 5), offsets=arrivals.constant(10)), ttft=7.0)
    assert [record.intended for record in one.records] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert [record.lag for record in one.records] == [0] * 5
    assert sender.most == 5


def test_what_waits_for_room_in_the_client_is_as_late_as_what_waits_in_the_server() -> None:
    """Coordinated omission: a request each second to a server that takes two for each."""
    in_server, _ = run(Flow(conversations=islice(single(), 4), offsets=arrivals.constant(1)), serial=True)
    in_client, sender = run(Flow(conversations=islice(single(), 4), offsets=arrivals.constant(1), max_concurrency=1))
    assert sender.most == 1
    expected = [2.0, 3.0, 4.0, 5.0]
    assert [record.e2el for record in in_server.records] == expected
    assert [record.e2el for record in in_client.records] == expected
    assert [record.ttft for record in in_client.records] == [1.0, 2.0, 3.0, 4.0]
    assert [record.lag for record in in_client.records] == [0] * 4  # not the client's own fault


def test_the_duration_ends_starts_and_the_drain_cuts_off() -> None:
    flow = Flow(conversations=single(), offsets=arrivals.constant(1))
    one, _ = run(flow, duration=3.5, drain=1.0, ttft=1.2)
    assert one.ended == pytest.approx(3.5)
    assert [record.intended for record in one.records] == [0, 1, 2, 3]
    assert [record.completed for record in one.records] == [True, True, True, False]
    assert one.records[-1].error_kind == UNFINISHED
    assert not one.records[-1].failed
    # Window: tokens at 1.2, 1.7, 2.2, then 2.2, 2.7, 3.2, then 3.2; one request and another are done in it.
    assert throughput(one)["output_throughput"] == pytest.approx(7 / 3.5)
    assert throughput(one)["request_throughput"] == pytest.approx(2 / 3.5)


def test_an_interrupt_ends_at_once_with_what_there_is() -> None:
    one, sender = run(Flow(conversations=single(), concurrency=3), interrupt_at=2.5)
    assert one.interrupted
    assert one.ended == pytest.approx(2.5)
    assert [record.completed for record in one.records] == [True] * 3 + [False] * 3
    assert [record.error_kind for record in one.records[3:]] == [UNFINISHED] * 3
    assert sender.open == 0


def test_requests_that_still_wait_for_room_when_the_test_ends_are_cut_off() -> None:
    flow = Flow(conversations=islice(single(), 3), offsets=arrivals.constant(1), max_concurrency=1)
    one, _ = run(flow, interrupt_at=2.5, ttft=50.0)
    assert [record.error_kind for record in one.records] == [UNFINISHED] * 3
    assert [record.sent is None for record in one.records] == [False, True, True]


def test_turns_carry_what_was_said_and_wait_for_the_answer_and_the_thinking() -> None:
    turns = tuple(Turn(text=f"question {number}", num_output_tokens=1) for number in range(3))
    conversation = Conversation(kind="multi-turn", turns=turns, system="be brief", think_time=4.0)
    one, sender = run(Flow(conversations=iter([conversation]), concurrency=1))
    assert [record.intended for record in one.records] == [0, 5, 10]
    assert [(record.conversation, record.turn) for record in one.records] == [(0, 0), (0, 1), (0, 2)]
    assert [message["role"] for message in sender.prepared[2]] == ["system", *["user", "assistant"] * 2, "user"]
    assert sender.prepared[2][2:4] == [
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "question 1"},
    ]


def test_a_conversation_ends_with_a_failure_and_a_place_of_the_closed_loop_rests() -> None:
    turns = (Turn(text="a", num_output_tokens=1),) * 2
    conversations = repeat(Conversation(kind="chat", turns=turns), 3)
    one, _ = run(Flow(conversations=conversations, concurrency=1), fails=lambda record: record.conversation == 0)
    assert [(r.conversation, r.turn) for r in one.records] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert one.records[0].failed
    assert one.records[1].intended == pytest.approx(BACK_OFF)


def test_the_background_ends_with_the_foreground() -> None:
    decodes = Flow(conversations=islice(single("decode", 8), 2), concurrency=2)
    offsets = arrivals.delayed(arrivals.constant(1), 2.0)
    long_prompts = Flow(conversations=single("long", 1), offsets=offsets, background=True)
    one, _ = run(decodes, long_prompts)
    assert one.ended == 4.5
    starts = [record.intended for record in one.records if record.kind == "long"]
    assert starts == [2, 3, 4]
    assert all(record.completed for record in one.records)


def test_a_bug_of_ours_ends_the_round() -> None:
    def broken() -> Iterator[Conversation]:
        yield from islice(single(), 1)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup, match="unhandled"):
        run(Flow(conversations=broken(), concurrency=1))
