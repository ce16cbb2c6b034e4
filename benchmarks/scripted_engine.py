"""A decode node of its own process that says scripted tokens over the real link and notes when.

One step gives each running request one token and sends them in one message, as a node does. With `interval` 0 steps
follow one another as fast as they can be sent.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from connector.server_messages import Generate, TokenOutput, Tokens
from engine.model_config import ModelConfig
from engine.request import SampledToken
from tests.server_rig import FakeNode, make_identity

ANSWER_TIMEOUT = 60.0


@dataclass(frozen=True)
class Plan:
    """What each request gets: these tokens, one per step of `interval` seconds."""

    token_ids: tuple[int, ...]
    interval: float


@dataclass
class Timing:
    """When the node got a request and when it sent each of its tokens, on this host's monotonic clock."""

    received: float
    sent: list[float] = field(default_factory=list)


class _Engine:
    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self._running: list[str] = []
        self._arrived = threading.Condition()
        self.plan = Plan((), 1.0)
        self.timings: dict[str, Timing] = {}
        node.script = self._accept
        threading.Thread(target=self._run, daemon=True).start()

    def _accept(self, node: FakeNode, generate: Generate) -> None:
        with self._arrived:
            self.timings[generate.request_id] = Timing(time.monotonic())
            self._running.append(generate.request_id)
            self._arrived.notify()

    def _run(self) -> None:
        due = 0.0
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._running)
                running = list(self._running)
            due = max(due + self.plan.interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            self._step(running)

    def _step(self, running: Sequence[str]) -> None:
        token_ids = self.plan.token_ids
        outputs, ended = [], set()
        for request_id in running:
            timing = self.timings[request_id]
            token = SampledToken(token_ids[len(timing.sent)])
            timing.sent.append(time.monotonic())
            is_last = len(timing.sent) == len(token_ids)
            ended |= {request_id} if is_last else set()
            end: dict[str, Any] = {"finish_reason": "length"} if is_last else {}
            outputs.append(TokenOutput(request_id=request_id, tokens=[token], **end))
        self._node.send(Tokens(outputs=outputs))
        with self._arrived:
            self._running = [request_id for request_id in self._running if request_id not in ended]


def _main(pipe: Connection, directory: Path) -> None:
    node = FakeNode()
    node.identity = make_identity(config_digest=ModelConfig.from_checkpoint(directory).digest())
    node.max_model_len = 1 << 20
    engine = _Engine(node)
    pipe.send(node.address)
    while (plan := pipe.recv()) is not None:
        timings, engine.timings, engine.plan = engine.timings, {}, plan
        pipe.send(timings)
    node.close()


@dataclass
class ScriptedEngine:
    """The process, from outside."""

    address: str
    _pipe: Connection

    def set_plan(self, plan: Plan) -> dict[str, Timing]:
        """Only while nothing runs. Returns the timings under the plan before, by the node's request ids."""
        self._pipe.send(plan)
        assert self._pipe.poll(ANSWER_TIMEOUT)
        timings: dict[str, Timing] = self._pipe.recv()
        return timings


@contextmanager
def running_engine(directory: Path) -> Iterator[ScriptedEngine]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, directory), daemon=True)
    process.start()
    try:
        assert ours.poll(ANSWER_TIMEOUT)
        yield ScriptedEngine(ours.recv(), ours)
        ours.send(None)
        process.join(ANSWER_TIMEOUT)
    finally:
        process.kill()
        process.join()
