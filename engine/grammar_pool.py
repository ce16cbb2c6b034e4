"""Compiles grammars beside the step loop, and keeps what it compiled.

The server has seen every grammar compile within seconds before it reaches a node (`server.grammar_checker`), so
nothing here is bounded but the number of grammars kept.
"""

import contextlib
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from engine.grammar import Grammar, GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_matcher import GrammarMatcher

MAX_COMPILED = 64
NUM_THREADS = 2
"""One slow grammar does not hold up all others."""
STACK_BYTES = 64 << 20
"""llguidance recurses along chains of rules; the server's check has 8 MiB."""
NICENESS = 10
"""The forward goes first where there are few cores."""

Compiled = Future[GrammarMatcher]
_Job = tuple[Grammar, Compiled]


class GrammarPool:
    """All methods are called by the engine's thread; `on_ready` by the pool's own."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], on_ready: Callable[[], None]) -> None:
        """`make_compiler` may raise `GrammarError`: then every grammar fails with it."""
        self._on_ready = on_ready
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._compiler: GrammarCompiler | GrammarError
        try:
            self._compiler = make_compiler()
        except GrammarError as error:
            self._compiler = error.with_traceback(None)

    def find(self, grammar: Grammar) -> Compiled:
        """The compiled grammar, or one that will be; its failure is a `GrammarError`."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Future()
            self._submit(grammar, compiled)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def close(self, timeout: float = 2.0) -> None:
        """What is being compiled may go on after `timeout`; nothing waits for it."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _submit(self, grammar: Grammar, compiled: Compiled) -> None:
        if isinstance(self._compiler, GrammarError):
            compiled.set_exception(self._compiler)
            return
        self._jobs.put((grammar, compiled))
        if not self._threads:
            self._start(self._compiler)

    def _start(self, compiler: GrammarCompiler) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            for number in range(NUM_THREADS):
                thread = threading.Thread(target=self._run, args=(compiler,), name=f"grammars-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(before)

    def _run(self, compiler: GrammarCompiler) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread, on Linux
        while (job := self._jobs.get()) is not None:
            grammar, compiled = job
            try:
                compiled.set_result(compiler.compile(grammar))
            except GrammarError as error:
                compiled.set_exception(error.with_traceback(None))
            self._on_ready()
