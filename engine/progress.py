"""What long preparations tell the person who waits: a bar on a terminal, plain lines elsewhere, always on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_SECONDS = 5.0


def say(text: str) -> None:
    """One line."""
    print(f"pdserve: {text}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to be called with the bytes done since its last call."""
    if on_terminal():
        with _bar(title, total_bytes) as advance:
            yield advance
    else:
        say(f"{title} ({total_bytes / 1e6:.0f} MB)")
        yield _Lines(title, total_bytes)


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    # Imported here: rich takes a while and most starts find the model ready.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """A line every few seconds, so that a log shows life without filling up."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._next_line = time.monotonic() + _LINE_SECONDS

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            say(f"{self._title}: {100 * self._done / max(self._total, 1):.0f} %")
