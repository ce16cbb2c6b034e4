"""One line, redrawn while a round runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.percentiles import Distribution
from loadtest.runner import Round

_INTERVAL = 0.5
_RECENT = 50
"""Requests whose latencies are shown."""


@asynccontextmanager
async def showing_progress(
    console: Console, title: str, one: Callable[[], Round], clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Nothing is drawn unless `console` is a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(Text(title), console=console, auto_refresh=False, transient=True) as live:
        task = asyncio.create_task(_redraw(live, title, one, clock))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _redraw(live: Live, title: str, one: Callable[[], Round], clock: Callable[[], float]) -> None:
    num_before, time_before = 0, clock()
    while True:
        await asyncio.sleep(_INTERVAL)
        num_tokens, now = sum(len(record.token_times) for record in one().records), clock()
        rate = (num_tokens - num_before) / (now - time_before)
        live.update(Text(f"{title}  {progress_words(one(), now)}  {rate:.0f} tokens/s"), refresh=True)
        num_before, time_before = num_tokens, now


def progress_words(one: Round, now: float) -> str:
    """Where the round is."""
    completed = sum(record.completed for record in one.records)
    failed = sum(record.failed for record in one.records)
    words = f"{now - one.started:.0f} s  {completed} completed  {len(one.records) - completed - failed} under way"
    if failed:
        words += f"  {failed} FAILED"
    recent = one.records[-_RECENT:]
    for name, values in (
        ("TTFT", [record.ttft for record in recent if record.ttft is not None]),
        ("ITL", [gap for record in recent for gap in record.itl[-20:]]),
    ):
        if figures := Distribution.of(values):
            words += f"  {name} p50 {figures.p50 * 1000:.0f} ms"
    return words
