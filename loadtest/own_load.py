"""The client's own share: was it the bottleneck?"""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PROBE_INTERVAL = 0.05


@dataclass(slots=True)
class OwnLoad:
    """`loop_lags`: how late the event loop woke, each interval. What it is late by is in every latency measured."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    loop_lags: list[float] = field(default_factory=list)

    @property
    def cpu_share(self) -> float:
        """Of one core, which is all that an event loop can use."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


@asynccontextmanager
async def watching_own_load(clock: Callable[[], float]) -> AsyncIterator[OwnLoad]:
    """Filled when the block is left."""
    load = OwnLoad()
    probe = asyncio.create_task(_probe(load, clock))
    cpu, wall = _cpu_seconds(), clock()
    try:
        yield load
    finally:
        load.cpu_seconds, load.wall_seconds = _cpu_seconds() - cpu, clock() - wall
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)


async def _probe(load: OwnLoad, clock: Callable[[], float]) -> None:
    while True:
        due = clock() + PROBE_INTERVAL
        await asyncio.sleep(PROBE_INTERVAL)
        load.loop_lags.append(max(0.0, clock() - due))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
