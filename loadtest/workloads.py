"""The named workloads: flags in, flows of conversations out. Pure: the same seed gives the same requests."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from loadtest import arrivals
from loadtest.config import (
    DEFAULT_CONCURRENCY,
    DEFAULT_LONG_RATE,
    DEFAULT_NUM_REQUESTS,
    LoadTestConfig,
    WorkloadConfig,
)
from loadtest.conversation import Conversation, Turn
from loadtest.errors import SettingError
from loadtest.sharegpt import about_num_prompt_tokens, read_sharegpt
from loadtest.trace_file import TracePrompts, TraceRow, read_trace
from loadtest.words import TokenRatio, random_text

_DEFAULT_LENGTHS = {"chat": (128, 128), "long": (2000, 32), "interference": (128, 512), "multi-turn": (64, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Conversations that arrive in one manner: a closed loop of `concurrency`, or an open one at `offsets`."""

    conversations: Iterator[Conversation]
    concurrency: int | None = None
    offsets: Iterator[float] | None = None
    max_concurrency: int | None = None
    background: bool = False
    """Ends when the other flows have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    flows: tuple[Flow, ...]
    num_left_out: int = 0
    """Conversations of the file that were too long."""


def make_plan(config: LoadTestConfig, seed: str, ratio: TokenRatio) -> Plan:
    """One round. Raises `SettingError` on a file that cannot be used."""
    match config.workload.workload:
        case "trace":
            return _trace_plan(config, seed, ratio)
        case "sharegpt":
            return _sharegpt_plan(config, seed)
        case "interference":
            return Plan(flows=_interference_flows(config, seed, ratio))
        case "multi-turn":
            return Plan(flows=(_flow(config, seed, _multi_turn(config.workload, seed, ratio)),))
        case "chat" | "long" as kind:
            return Plan(flows=(_flow(config, seed, _single(config.workload, kind, seed, ratio)),))


def _flow(config: LoadTestConfig, seed: str, conversations: Iterator[Conversation]) -> Flow:
    load = config.load
    conversations = itertools.islice(conversations, _num_requests(config))
    if load.rate is None:
        return Flow(conversations=conversations, concurrency=load.concurrency or DEFAULT_CONCURRENCY)
    offsets = _offsets(config, load.rate, seed, default="poisson")
    return Flow(conversations=conversations, offsets=offsets, max_concurrency=load.max_concurrency)


def _num_requests(config: LoadTestConfig) -> int | None:
    """None: as many as the duration, or the file, has room for."""
    load = config.load
    if load.num_requests is None and load.duration is None and config.workload.file is None:
        if config.workload.workload == "interference":
            return load.concurrency or DEFAULT_CONCURRENCY
        return DEFAULT_NUM_REQUESTS
    return load.num_requests


def _offsets(config: LoadTestConfig, rate: float, seed: str, *, default: str) -> Iterator[float]:
    rng = Random(f"{seed}/arrivals")
    match config.load.arrivals or default:
        case "constant":
            return arrivals.constant(rate)
        case "gamma":
            return arrivals.gamma(rate, config.load.burstiness, rng)
        case _:
            return arrivals.poisson(rate, rng)


def _interference_flows(config: LoadTestConfig, seed: str, ratio: TokenRatio) -> tuple[Flow, Flow]:
    load, workload = config.load, config.workload
    decodes = Flow(
        conversations=itertools.islice(_single(workload, "decode", seed, ratio), _num_requests(config)),
        concurrency=load.concurrency or DEFAULT_CONCURRENCY,
    )
    offsets = _offsets(config, load.rate or DEFAULT_LONG_RATE, seed, default="constant")
    long_prompts = Flow(
        conversations=_long_prompts(workload, seed, ratio),
        offsets=arrivals.delayed(offsets, workload.lead),
        max_concurrency=load.max_concurrency,
        background=True,
    )
    return decodes, long_prompts


def _single(workload: WorkloadConfig, kind: str, seed: str, ratio: TokenRatio) -> Iterator[Conversation]:
    rng = Random(f"{seed}/{kind}")
    num_input, num_output = _lengths(workload)
    while True:
        turn = _turn(rng, ratio, _spread(rng, num_input, workload), _spread(rng, num_output, workload))
        yield Conversation(kind=kind, turns=(turn,))


def _long_prompts(workload: WorkloadConfig, seed: str, ratio: TokenRatio) -> Iterator[Conversation]:
    rng = Random(f"{seed}/long")
    while True:
        turn = _turn(rng, ratio, workload.long_tokens, workload.long_output_tokens)
        yield Conversation(kind="long", turns=(turn,))


def _multi_turn(workload: WorkloadConfig, seed: str, ratio: TokenRatio) -> Iterator[Conversation]:
    """Which system prompt a conversation has is drawn; the prompts are the same for all of a round."""
    rng = Random(f"{seed}/multi-turn")
    num_input, num_output = _lengths(workload)
    num_system_words = ratio.num_words(workload.system_tokens, with_overhead=False) if workload.system_tokens else 0
    prefixes = [random_text(rng, num_system_words) for _ in range(workload.num_prefixes)]
    while True:
        turns = []
        for _ in range(workload.turns):
            num_words = ratio.num_words(_spread(rng, num_input, workload), with_overhead=False)
            num_tokens = _spread(rng, num_output, workload)
            turns.append(Turn(text=random_text(rng, num_words), num_output_tokens=num_tokens))
        yield Conversation(
            kind="multi-turn", turns=tuple(turns), system=rng.choice(prefixes), think_time=workload.think_time
        )


def _lengths(workload: WorkloadConfig) -> tuple[int, int]:
    num_input, num_output = _DEFAULT_LENGTHS[workload.workload]
    return workload.input_tokens or num_input, workload.output_tokens or num_output


def _spread(rng: Random, length: int, workload: WorkloadConfig) -> int:
    if not workload.length_spread:
        return length
    return max(1, round(length * rng.uniform(1 - workload.length_spread, 1 + workload.length_spread)))


def _turn(rng: Random, ratio: TokenRatio, num_input: int, num_output: int) -> Turn:
    text = random_text(rng, ratio.num_words(num_input))
    return Turn(text=text, num_input_tokens=num_input, num_output_tokens=num_output)


def _trace_plan(config: LoadTestConfig, seed: str, ratio: TokenRatio) -> Plan:
    workload = config.workload
    assert workload.file is not None
    prompts = TracePrompts(seed=seed, block_tokens=workload.trace_block_tokens, scale=workload.trace_scale, ratio=ratio)
    rows = read_trace(workload.file)
    limit = workload.max_input_tokens
    kept = [row for row in rows if limit is None or prompts.num_input_tokens(row) <= limit]
    _require_some(kept)
    conversations = map(prompts.conversation, kept)
    flow = _trace_flow(config, kept, conversations) or _flow(config, seed, conversations)
    return Plan(flows=(flow,), num_left_out=len(rows) - len(kept))


def _trace_flow(config: LoadTestConfig, rows: list[TraceRow], conversations: Iterator[Conversation]) -> Flow | None:
    """By the trace's own timestamps, unless a rate or a concurrency is asked for."""
    load = config.load
    if load.rate is not None or load.concurrency is not None:
        return None
    return Flow(
        conversations=itertools.islice(conversations, load.num_requests),
        offsets=(row.offset / load.speed for row in rows),
        max_concurrency=load.max_concurrency,
    )


def _sharegpt_plan(config: LoadTestConfig, seed: str) -> Plan:
    workload = config.workload
    assert workload.file is not None
    found = read_sharegpt(workload.file, max_turns=workload.turns, think_time=workload.think_time)
    limit = workload.max_input_tokens
    kept = [one for one in found if limit is None or about_num_prompt_tokens(one) <= limit]
    _require_some(kept)
    Random(f"{seed}/order").shuffle(kept)
    return Plan(flows=(_flow(config, seed, iter(kept)),), num_left_out=len(found) - len(kept))


def _require_some(kept: list[TraceRow] | list[Conversation]) -> None:
    if not kept:
        raise SettingError("--max-input-tokens leaves nothing of --file")
