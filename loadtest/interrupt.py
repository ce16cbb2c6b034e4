"""Ctrl-C: the first ends the round and leaves its figures; before the first round, or once more, it ends everything."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.runner import Runner


class Interrupt:
    def __init__(self) -> None:
        self.happened = False
        self._runner: Runner | None = None

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Call within the task that a Ctrl-C is to cancel."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._act, task)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    @contextmanager
    def of(self, runner: Runner) -> Iterator[None]:
        """Meanwhile it is `runner` that is interrupted."""
        self._runner = runner
        try:
            yield
        finally:
            self._runner = None

    def _act(self, task: "asyncio.Task[object]") -> None:
        if self._runner is None or self.happened:
            task.cancel()
        else:
            self._runner.interrupt()
        self.happened = True
