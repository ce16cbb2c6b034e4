"""What the fault tests have in common: a ring that must be left at rest, prompts, and places to stop a race at."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connector import failpoints
from connector.failpoints import FailPoint
from engine.sampling_params import SamplingParams
from tests.oracle import Oracle
from tests.ring import Answer, Client, Ring, RunningNode, running_ring, wait_until

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
QUICK = {"heartbeat_interval": 0.05}
"""Nothing else is: on a busy machine a thread may be silent for seconds, and a transfer stands still while a test looks
at it."""
IMPATIENT = QUICK | {"peer_timeout": 1.5}
"""For tests whose peers fall silent."""
STRICT = {"kv_load_failure_policy": "fail", "fallback": "fail"}
"""Failures end requests, so that a test sees them."""
AT_ONCE = 1.0
"""Seconds within which everything must be free again, without new traffic."""
_fresh_seeds = itertools.count(1000)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(290), k=length)


@contextmanager
def fault_ring(model: Path, **settings: Any) -> Iterator[Ring]:
    """Ends with both nodes at rest and their books balanced."""
    with running_ring(model, **settings) as ring:
        yield ring
        ring.wait_until_quiescent()
        assert_books_balance(ring)


def assert_books_balance(ring: Ring) -> None:
    for node in (ring.decode, ring.prefill):
        assert node.failure is None
        wait_until(node.engine.is_idle, "idle")
        node.engine.scheduler.check()


def assert_at_rest_soon(ring: Ring) -> None:
    """Without new traffic."""
    for node in (ring.decode, ring.prefill):
        wait_until(node.is_quiescent, f"at rest: {node.state()}", AT_ONCE)


@contextmanager
def stopped_at(name: str) -> Iterator[FailPoint]:
    """Whoever gets to this fail-point stands still until the block is left, or the point is released."""
    (point,) = failpoints.arm(f"{name}=pause")
    try:
        yield point
    finally:
        failpoints.disarm(name)


def wait_until_hit(point: FailPoint, times: int = 1) -> None:
    wait_until(lambda: point.num_hits >= times, f"somebody at {point.name}")


def assert_right(answer: Answer, oracle: Oracle, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
    assert answer.final.finish_reason == "length", answer.final.error
    assert answer.token_ids == oracle.greedy(prompt, num_tokens)


def assert_serves(ring: Ring, oracle: Oracle) -> None:
    """A new request gets its KV from the prefill node, and the right tokens."""
    assert_transfers(ring.decode, ring.client, oracle)


def assert_transfers(decode: RunningNode, client: Client, oracle: Oracle) -> None:
    prompt = make_prompt(11, seed=next(_fresh_seeds))
    counters = decode.engine.scheduler.counters
    before = counters.prompt_tokens_computed
    assert_right(client.start(prompt, GREEDY)[1], oracle, prompt)
    # Not what was loaded: an early request may be over before the end of its transfer was reported.
    assert counters.prompt_tokens_computed == before, "a silent fallback"
