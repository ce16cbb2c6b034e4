"""Node processes, clients and clocks for the benchmarks. Everything here compares two ways within one run."""

import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.server_messages import TokenOutput
from engine.sampling_params import SamplingParams
from tests.faults.processes import ANYWHERE, START_TIMEOUT, NodeProcess
from tests.relay import Relay, running_relay
from tests.ring import Answer, Client, wait_until

SHAPE = ("--dtype", "bfloat16", "--block-size", "16", "--num-blocks", "600", "--num-threads", "1")
SHAPE += ("--debug-state", "--log-level", "warning")
FEW_TOKENS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
"""More than two: a request that ends at its second token may end before its transfer was reported."""


class TimedClient(Client):
    """Notes when each output arrived, on this process's monotonic clock."""

    def __init__(self, address: str) -> None:
        self.times: dict[str, list[float]] = {}
        self.started: dict[str, float] = {}
        super().__init__(address)

    def start(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> tuple[str, Answer]:
        began = time.monotonic()
        request_id, answer = super().start(prompt, sampling, **fields)
        self.started[request_id] = began
        return request_id, answer

    def wait_for_tokens(self, request_ids: Sequence[str], count: int) -> float:
        """When each of them has at least `count` tokens."""
        wait_until(lambda: all(len(self.times.get(name, ())) >= count for name in request_ids), "tokens", 60)
        return time.monotonic()

    def gaps(self, request_id: str, began: float, ended: float) -> list[float]:
        """Between consecutive tokens of one stream, within a stretch of time."""
        times = [at for at in self.times[request_id] if began <= at <= ended]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def _take(self, output: TokenOutput) -> None:
        if output.tokens:
            self.times.setdefault(output.request_id, []).extend([time.monotonic()] * len(output.tokens))
        super()._take(output)


@dataclass
class Pair:
    """A prefill node, a decode node, and the relay that all KV between them goes through."""

    prefill: NodeProcess
    decode: NodeProcess
    relay: Relay
    client: TimedClient
    prefill_client: TimedClient

    def last_transfer(self) -> dict[str, Any]:
        transfers: list[dict[str, Any]] = self.decode.get("/debug/state")["transfers"]["recent"]
        return transfers[-1]

    def is_joined(self) -> bool:
        return self.decode.counter("pdserve_kv_prefill_peers_ready") == 1

    def throttle(self, num_tokens: int, seed: int) -> float:
        """Sets the link so that the KV of a prompt takes as long as its prefill takes now; those seconds."""
        self.relay.bytes_per_second = None
        self.client.generate(make_prompt(num_tokens, seed), FEW_TOKENS)
        transfer = self.last_transfer()
        seconds: float = transfer["computed_at"] - transfer["granted_at"]
        self.relay.bytes_per_second = transfer["num_bytes"] / seconds
        return seconds


@contextmanager
def running_pairs(
    model: str, ways: Mapping[str, Sequence[str]], *, both: Sequence[str] = (), is_relayed: bool = True
) -> Iterator[dict[str, Pair]]:
    """One prefill node, and for each way a decode node with those flags, behind a relay of its own; all nodes with the
    flags `both`. Where the link itself is measured, the relay stands aside.

    The decode nodes share a core, as only one of them works at a time; prefill has another, where there is one. KV goes
    as messages, so that the relay sees it; no prefix cache, so that every prompt travels whole.
    """
    common = ("--model", model, "--transport", "zmq", "--no-enable-prefix-caching", *SHAPE, *both)
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        places = [word for pair in ANYWHERE.items() for word in pair]
        prefill = _start(stack, "prefill", [*common, *places, "--cpus", str(cpus[0])])
        prefill_client = _client(stack, prefill)
        pairs = {}
        for way, flags in ways.items():
            relay = stack.enter_context(running_relay())
            relay.target = prefill.where["kv_address"]
            dialled = relay.address if is_relayed else relay.target
            at = ["--listen", "tcp://127.0.0.1:0", "--admin-port", "0", "--prefill", dialled]
            decode = _start(stack, "decode", [*common, *at, "--cpus", str(cpus[-1]), *flags])
            pairs[way] = Pair(prefill, decode, relay, _client(stack, decode), prefill_client)
        for pair in pairs.values():
            wait_until(pair.is_joined, "the handshake", START_TIMEOUT)
        yield pairs


@contextmanager
def running_alone(model: str) -> Iterator[TimedClient]:
    """A decode node that computes everything itself, on a core of its own where there are two."""
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        at = ["--listen", "tcp://127.0.0.1:0", "--admin-port", "0", "--cpus", str(cpus[-1])]
        yield _client(stack, _start(stack, "decode", ["--model", model, *SHAPE, *at]))


def _client(stack: ExitStack, node: NodeProcess) -> TimedClient:
    client = TimedClient(node.where["address"])
    stack.callback(client.close)
    return client


def _start(stack: ExitStack, role: str, flags: list[str]) -> NodeProcess:
    node = NodeProcess(role, flags)
    stack.callback(node.close)
    node.start()
    return node


def make_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=length)


@dataclass
class Table:
    """Samples of two ways, and what is said about them in the end."""

    title: str
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, way: str, **values: float) -> None:
        for name, value in values.items():
            self.samples.setdefault(name, {}).setdefault(way, []).append(value)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            name: {way: statistics.median(values) for way, values in ways.items()}
            for name, ways in self.samples.items()
        }

    def print(self) -> None:
        print(self.title)
        for name, ways in self.medians().items():
            spread = ", ".join(
                f"{way} {median:.4g} ({min(self.samples[name][way]):.4g} to {max(self.samples[name][way]):.4g})"
                for way, median in ways.items()
            )
            first, *others = ways.values()
            ratio = f"   ratio {first / others[0]:.3f}" if others and others[0] else ""
            print(f"  {name}: {spread}{ratio}")

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps({"title": self.title, "samples": self.samples, "medians": self.medians()}))
