"""Measures one server, or two in turns: learn the model, calibrate, warm up, then round after round."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from loadtest.client import Client, Target, first_model, open_session
from loadtest.config import LoadTestConfig
from loadtest.conversation import Conversation, Turn
from loadtest.errors import ServerError, SettingError
from loadtest.interrupt import Interrupt
from loadtest.own_load import watching_own_load
from loadtest.progress import showing_progress
from loadtest.record import Record
from loadtest.runner import Runner
from loadtest.summary import Run
from loadtest.words import WORDS, TokenRatio, random_text
from loadtest.workloads import make_plan

clock = time.perf_counter
_FEW_WORDS, _MANY_WORDS = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the servers under test."""

    base_url: str
    model: str | None
    api_key: str | None
    label: str


def sides_of(config: LoadTestConfig, environment_key: str | None) -> list[Side]:
    """Raises `SettingError` if a key cannot be read."""
    target = config.target
    key = _read_key("--api-key-file", target.api_key_file) or environment_key
    label = config.output.label or target.base_url
    sides = [Side(base_url=target.base_url, model=target.model, api_key=key, label=label)]
    if target.against is not None:
        key = _read_key("--against-api-key-file", target.against_api_key_file)
        other = config.output.against_label or target.against
        other += " (second)" if other == label else ""
        sides.append(Side(base_url=target.against, model=target.against_model, api_key=key, label=other))
    return sides


def _read_key(flag: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{flag}: {error}") from error
    if not lines:
        raise SettingError(f"{flag} {path} is empty")
    return lines[0]


async def measure(
    config: LoadTestConfig, sides: Sequence[Side], seed: int, settings: dict[str, Any], console: Console
) -> list[Run]:
    """A run for each side. Raises `ServerError` if one cannot be warmed up; Ctrl-C gives what there is so far."""
    interrupt = Interrupt()
    async with AsyncExitStack() as stack:
        stack.enter_context(interrupt.on_signal())
        contenders = []
        # Two servers are asked the same; one that is compared with itself is not, or its cache would know the answer.
        same = len({side.base_url for side in sides}) < len(sides)
        for position, side in enumerate(sides):
            session = await stack.enter_async_context(open_session(side.api_key))
            model = side.model or await first_model(session, side.base_url)
            client = Client(session, _target(config, side, model), clock)
            run = Run(label=side.label, settings=settings | {"model": model})
            contenders.append(_Contender(config, client, run, f"{seed}/{position}" if same else str(seed)))
        for contender in contenders:
            await contender.make_ready()
        for number in range(config.num_rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                await contender.run_round(number, interrupt, console)
                if interrupt.happened:
                    return [contender.run for contender in contenders]
    return [contender.run for contender in contenders]


def _target(config: LoadTestConfig, side: Side, model: str) -> Target:
    target = config.target
    return Target(
        base_url=side.base_url,
        model=model,
        chat=target.endpoint == "chat",
        exact_output=target.exact_output,
        timings=target.timings,
        fields=target.fields,
        timeout=target.timeout,
    )


class _Contender:
    """A server, its client, and its run so far."""

    def __init__(self, config: LoadTestConfig, client: Client, run: Run, seed: str) -> None:
        self.run = run
        self._seed = seed
        self._config = config
        self._client = client
        self._ratio = TokenRatio()

    async def make_ready(self) -> None:
        load = self._config.load
        if load.calibrate:
            self._ratio = await self._calibrate()
        self.run.settings |= {"tokens_per_word": self._ratio.tokens_per_word, "prompt_overhead": self._ratio.overhead}
        for conversation in itertools.islice(self._warmup_conversations(), load.warmup):
            turn = conversation.turns[0]
            await self._ask("warm-up", turn.text, turn.num_output_tokens)

    async def _calibrate(self) -> TokenRatio:
        points = []
        for num_words in (_FEW_WORDS, _MANY_WORDS):
            text = " ".join(WORDS[:: len(WORDS) // num_words][:num_words])
            record = await self._ask("calibration (--no-calibrate goes without)", text, 1)
            points.append((num_words, record.prompt_tokens))
        (few, few_tokens), (many, many_tokens) = points
        if few_tokens is None or many_tokens is None:
            return TokenRatio()
        return TokenRatio.fit((few, few_tokens), (many, many_tokens))

    def _warmup_conversations(self) -> Iterator[Conversation]:
        """One of each flow in turn. A file's own conversations are kept for the test: a cache would know them."""
        if self._config.workload.workload == "sharegpt":
            turn = Turn(
                text=random_text(Random(f"{self._seed}/warm-up"), self._ratio.num_words(64)), num_output_tokens=16
            )
            return itertools.cycle([Conversation(kind="warm-up", turns=(turn,))])
        plan = make_plan(self._config, f"{self._seed}/warm-up", self._ratio)
        return itertools.cycle([next(flow.conversations) for flow in plan.flows])

    async def _ask(self, what: str, text: str, num_output_tokens: int) -> Record:
        body = self._client.prepare([{"role": "user", "content": text}], num_output_tokens)
        record = Record(kind="warm-up", conversation=0, turn=0, intended=clock())
        await self._client.complete(body, record)
        if not record.completed:
            raise ServerError(f"{self._client.target.url}: {what} failed: {record.error_kind}: {record.error}")
        return record

    async def run_round(self, number: int, interrupt: Interrupt, console: Console) -> None:
        load = self._config.load
        plan = make_plan(self._config, f"{self._seed}/{number}", self._ratio)
        runner = Runner(self._client, clock, drain=load.drain)
        async with (
            watching_own_load(clock) as own_load,
            showing_progress(console, self.run.label, lambda: runner.round, clock),
        ):
            with interrupt.of(runner):
                self.run.rounds.append(await runner.run(plan.flows, load.duration))
        self.run.loads.append(own_load)
        self.run.num_left_out = plan.num_left_out
