"""What the server adds to an engine: latency for each request and token, and CPU time.

The engine is scripted, behind the real link; the same engine behind a bare ASGI application is the floor that the
server is compared with, in the same run. Server and floor are processes of their own on one core; engine and clients
share another, where there is one. `python -m benchmarks.server_latency --help`.

  request added     from the request's first byte to the engine having it
  first added       that, and from the engine's first token to the client
  token added       from a token's sending by the engine to its arrival at the client, tokens coming at a steady pace
  CPU us / token    of the server's process, what a request costs by itself taken off; 1000 of these are CPU seconds
                    per million tokens, and 1e6 divided by it is tokens/s per core
  CPU us / request  of the same, from requests of one token
  requests/s        of one token each, as fast as these clients ask
  flood tokens/s    with an engine that does not wait between its steps
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tyro
import uvloop

from benchmarks.bare_server import MODEL_NAME, serve
from benchmarks.nodes import Table
from benchmarks.scripted_engine import Plan, ScriptedEngine, Timing, running_engine
from benchmarks.stream_client import Arrival, Clients
from engine.model_source import resolve_model
from server.__main__ import main as run_server
from server.tokenizer import Tokenizer
from tests.faults.processes import START_TIMEOUT, free_ports
from tests.ring import wait_until

TEXT = "The server adds a little to each token and the engine adds much more, so it is worth to look at both of them. "
BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": TEXT}], "stream": True, "max_tokens": 4096}


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2-135m"
    """Only its tokenizer is used."""
    concurrency: tuple[int, ...] = (1, 16, 64)
    """Streams at the same time."""
    interval_ms: float = 20.0
    """Between two tokens of a stream."""
    tokens: int = 100
    """Of each answer that comes at that pace."""
    flood_tokens: int = 200
    """Of each answer that comes as fast as possible."""
    rounds: int = 3
    """Alternations of server and floor."""
    json: Path | None = None
    """Also write the samples here, one file for each concurrency."""


@dataclass
class Target:
    """A process that answers HTTP, with an engine of its own."""

    engine: ScriptedEngine
    clients: Clients
    pid: int

    def run(self, plan: Plan, num_clients: int, num_requests: int) -> "Run":
        self.engine.set_plan(plan)
        cpu, began = self._cpu_seconds(), time.monotonic()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            arrivals = runner.run(self.clients.run(num_clients, num_requests))
        seconds = time.monotonic() - began
        return Run(arrivals, self.engine.set_plan(plan), seconds, self._cpu_seconds() - cpu)

    def _cpu_seconds(self) -> float:
        # Of every thread in nanoseconds; the process's own times come in steps of 10 ms.
        stats = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


@dataclass
class Run:
    """What came of a number of requests."""

    arrivals: list[Arrival]
    timings: dict[str, Timing]
    seconds: float
    cpu_seconds: float

    def __post_init__(self) -> None:
        self.timings = {name.rsplit("-", 2)[0]: timing for name, timing in self.timings.items()}

    @property
    def num_tokens(self) -> int:
        return sum(len(timing.sent) for timing in self.timings.values())

    def latencies(self) -> dict[str, float]:
        """In milliseconds."""
        pairs = [(arrival, self.timings[arrival.request_id]) for arrival in self.arrivals]
        requests = [timing.received - arrival.sent for arrival, timing in pairs]
        tokens = [
            [came - sent for came, sent in zip(arrival.events[1:-1], timing.sent, strict=True)]
            for arrival, timing in pairs
        ]
        firsts = [request + of_one[0] for request, of_one in zip(requests, tokens, strict=True)]
        later = [latency for of_one in tokens for latency in of_one[1:]]
        return {
            "request added ms p50": 1e3 * statistics.median(requests),
            "first added ms p50": 1e3 * statistics.median(firsts),
            "first added ms p99": 1e3 * _p99(firsts),
            "token added ms p50": 1e3 * statistics.median(later),
            "token added ms p99": 1e3 * _p99(later),
        }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def measure(target: Target, token_ids: Sequence[int], concurrency: int, options: Options) -> dict[str, float]:
    """One round of one target."""

    def plan(num_tokens: int, interval: float) -> Plan:
        return Plan(tuple((token_ids * num_tokens)[:num_tokens]), interval)

    single = target.run(plan(1, 0.0), concurrency, max(640 // concurrency, 10))
    paced = target.run(plan(options.tokens, options.interval_ms / 1e3), concurrency, 2 if concurrency > 1 else 4)
    flood = target.run(plan(options.flood_tokens, 0.0), concurrency, max(64 // concurrency, 2))
    per_request = single.cpu_seconds / len(single.arrivals)

    def per_token(run: Run) -> float:
        return (run.cpu_seconds - per_request * len(run.arrivals)) / (run.num_tokens - len(run.arrivals))

    return {
        **paced.latencies(),
        "CPU us / token": 1e6 * per_token(paced),
        "CPU us / token, flood": 1e6 * per_token(flood),
        "CPU us / request": 1e6 * per_request,
        "requests/s": len(single.arrivals) / single.seconds,
        "flood tokens/s": flood.num_tokens / flood.seconds,
    }


@contextmanager
def running_target(
    directory: Path, serve_at: Callable[[int, str], tuple[Any, ...]], cpus: Sequence[int]
) -> Iterator[Target]:
    """`serve_at` gives function and arguments of the process, from its port and its engine's address."""
    (port,) = free_ports(1)
    with running_engine(directory) as engine:
        function, *arguments = serve_at(port, engine.address)
        process = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
        process.start()
        try:
            assert process.pid is not None
            os.sched_setaffinity(process.pid, {cpus[0]})
            wait_until(lambda: _is_ready(port), "ready", START_TIMEOUT)
            yield Target(engine, Clients(port, BODY), process.pid)
        finally:
            process.terminate()
            process.join(10)
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def running_targets(directory: Path, token_ids: Sequence[int]) -> Iterator[dict[str, Target]]:
    cpus = sorted(os.sched_getaffinity(0))
    # Inherited by the engines.
    os.sched_setaffinity(0, {cpus[-1]})

    def server(port: int, address: str) -> tuple[Any, ...]:
        flags = ["--model", str(directory), "--served-model-name", MODEL_NAME, "--port", str(port), "--decode", address]
        return run_server, [*flags, "--log-level", "warning"]

    def bare(port: int, address: str) -> tuple[Any, ...]:
        return serve, port, address, directory, token_ids

    with ExitStack() as stack:
        ways = {"server": server, "bare": bare}
        yield {way: stack.enter_context(running_target(directory, ways[way], cpus)) for way in ways}


def main(options: Options) -> None:
    directory = resolve_model(options.model)
    token_ids = Tokenizer.from_directory(directory).encode(TEXT, add_special_tokens=False)
    with running_targets(directory, token_ids) as targets:
        for target in targets.values():
            target.run(Plan(tuple(token_ids), 0.0), 16, 4)  # warms up
        for concurrency in options.concurrency:
            table = Table(f"{concurrency} streams, a token of each every {options.interval_ms:g} ms")
            for _ in range(options.rounds):
                for way, target in targets.items():
                    table.add(way, **measure(target, token_ids, concurrency, options))
            table.print()
            table.write(options.json and options.json.with_stem(f"{options.json.stem}-{concurrency}"))


if __name__ == "__main__":
    main(tyro.cli(Options))
