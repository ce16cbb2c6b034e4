"""Runs a round: starts each conversation when it is due, whatever became of those before.

A conversation's life:

    due (planned arrival, or a free worker) -> [waits for --max-concurrency] -> sent -> first token -> done
                                                                                     -> next turn is due

A round ends when the flows in the foreground have, when its duration is over, or when it is interrupted.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.conversation import Conversation, Turn
from loadtest.record import UNFINISHED, Record
from loadtest.workloads import Flow

BACK_OFF = 0.1
"""Seconds that a place of a closed loop rests after a failure, so that a server that refuses is not stormed."""

_LOOKAHEAD = 32
_SPARE = 0.005
"""Seconds until the next request is due, in which there is time to make another one."""


class Sender(Protocol):
    """What the runner needs of a client."""

    def prepare(self, messages: list[dict[str, str]], num_output_tokens: int) -> bytes: ...

    async def complete(self, body: bytes, record: Record) -> str: ...


@dataclass(slots=True, kw_only=True)
class Round:
    """What happened. The window is the time whose throughput counts: without the drain."""

    started: float
    ended: float = 0.0
    records: list[Record] = field(default_factory=list)
    interrupted: bool = False


class Runner:
    """Runs one round at a time."""

    def __init__(self, sender: Sender, clock: Callable[[], float], *, drain: float) -> None:
        self._sender = sender
        self._clock = clock
        self._drain = drain
        self._stop = asyncio.Event()
        self._interrupt = asyncio.Event()
        self._num_conversations = 0
        self.round = Round(started=clock())

    def interrupt(self) -> None:
        """Ends the round at once; what is under way is cut off."""
        self.round.interrupted = True
        self._interrupt.set()

    async def run(self, flows: tuple[Flow, ...], duration: float | None) -> Round:
        feeds = {position: _Feed(flow) for position, flow in enumerate(flows) if flow.offsets is not None}
        self.round.started = self._clock()
        tasks = [
            asyncio.create_task(self._dispatch(flow, feeds[position]) if position in feeds else self._run_closed(flow))
            for position, flow in enumerate(flows)
        ]
        foreground = [task for task, flow in zip(tasks, flows, strict=True) if not flow.background]
        over = asyncio.create_task(self._interrupt.wait())
        try:
            await _wait_for_all(foreground, tasks, over, duration)
            self.round.ended = self._clock()
            self._stop.set()
            await _wait_for_all(tasks, tasks, over, self._drain)
        finally:
            for task in [over, *tasks]:
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
        for record in self.round.records:
            if record.done is None:
                record.fail(UNFINISHED, "had not been sent when the test ended")
        return self.round

    async def _run_closed(self, flow: Flow) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(flow.concurrency or 1):
                group.create_task(self._work(flow))

    async def _work(self, flow: Flow) -> None:
        """One place of a closed loop."""
        for conversation in flow.conversations:
            if self._stop.is_set():
                return
            if not await self._converse(conversation, None):
                await self._sleep_until(self._clock() + BACK_OFF)

    async def _dispatch(self, flow: Flow, feed: "_Feed") -> None:
        """An open loop."""
        room: AbstractAsyncContextManager[object] = nullcontext()
        if flow.max_concurrency is not None:
            room = asyncio.Semaphore(flow.max_concurrency)
        async with asyncio.TaskGroup() as group:
            while (due := feed.next_due(self.round.started)) is not None and not self._stop.is_set():
                if due - self._clock() > _SPARE and feed.fetch():
                    await asyncio.sleep(0)
                    continue
                await self._sleep_until(due)
                if not self._stop.is_set():
                    group.create_task(self._converse(feed.take(), due, room))

    async def _converse(
        self,
        conversation: Conversation,
        due: float | None,
        room: AbstractAsyncContextManager[object] | None = None,
    ) -> bool:
        """False: a request of it failed."""
        number, self._num_conversations = self._num_conversations, self._num_conversations + 1
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for position, turn in enumerate(conversation.turns):
            messages.append({"role": "user", "content": turn.text})
            body = self._sender.prepare(messages, turn.num_output_tokens)
            record = self._open_record(conversation, turn, number, position, due)
            record.released = self._clock()
            async with room or nullcontext():
                answer = await self._sender.complete(body, record)
            if not record.completed:
                return False
            messages.append({"role": "assistant", "content": answer})
            if position + 1 < len(conversation.turns):
                due = self._clock() + conversation.think_time
                await self._sleep_until(due)
                if self._stop.is_set():
                    break
        return True

    def _open_record(
        self, conversation: Conversation, turn: Turn, number: int, position: int, due: float | None
    ) -> Record:
        record = Record(
            kind=conversation.kind,
            conversation=number,
            turn=position,
            intended=self._clock() if due is None else due,
            asked_input_tokens=turn.num_input_tokens,
            asked_output_tokens=turn.num_output_tokens,
        )
        self.round.records.append(record)
        return record

    async def _sleep_until(self, due: float) -> None:
        """Or until the round ends. Timers may ring early by their resolution."""
        while not self._stop.is_set() and (left := due - self._clock()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._stop.wait()
            except TimeoutError:
                continue


class _Feed:
    """Conversations of an open loop, made before they are due: making a long prompt must not make it late."""

    def __init__(self, flow: Flow) -> None:
        assert flow.offsets is not None
        self._source = zip(flow.conversations, flow.offsets, strict=False)
        self._ready: deque[tuple[Conversation, float]] = deque()
        while self.fetch():
            pass

    def fetch(self) -> bool:
        """Makes one more. False: enough are ready, or there are no more."""
        if len(self._ready) >= _LOOKAHEAD or (found := next(self._source, None)) is None:
            return False
        self._ready.append(found)
        return True

    def next_due(self, started: float) -> float | None:
        if not self._ready:
            self.fetch()
        return started + self._ready[0][1] if self._ready else None

    def take(self) -> Conversation:
        return self._ready.popleft()[0]


async def _wait_for_all(
    wanted: Sequence["asyncio.Task[None]"],
    all_tasks: Sequence["asyncio.Task[None]"],
    over: "asyncio.Task[bool]",
    seconds: float | None,
) -> None:
    """Until `wanted` are done, `over` is, or the time is. A failed task, which is our bug, raises here."""
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    while any(not task.done() for task in wanted) and not over.done():
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            return
        pending: list[asyncio.Task[Any]] = [task for task in (*all_tasks, over) if not task.done()]
        await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in all_tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
