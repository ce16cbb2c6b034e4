"""Whether a grammar can be compiled, asked of a child process, off the event loop, and remembered."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ErrorKind, RequestError, ServingError
from engine.grammar import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from server.grammar_child import CPU_SECONDS, READY

AskedKind = GrammarKind | Literal["grammar"]
"""`grammar` is Lark or GBNF."""
MAX_REMEMBERED = 1024
MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grammar for the nodes, or why there is none."""

    grammar: Grammar | None
    reason: str = ""


class GrammarChecker:
    """Belongs to the event loop. The child is started with the first grammar, and again when one was too much."""

    def __init__(self, directory: Path) -> None:
        self._child = _Child(directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._verdicts: OrderedDict[tuple[AskedKind, str], Verdict] = OrderedDict()
        self._num_waiting = 0

    async def check(self, kind: AskedKind, text: str, param: str) -> Grammar:
        """Raises `RequestError` naming `param`, with the compiler's reason."""
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{param}: at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", param=param)
        verdict = self._verdicts.get((kind, text)) or await self._ask(kind, text)
        self._verdicts[kind, text] = verdict
        self._verdicts.move_to_end((kind, text))
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        if verdict.grammar is None:
            raise RequestError(f"{param}: {verdict.reason}", param=param)
        return verdict.grammar

    async def _ask(self, kind: AskedKind, text: str) -> Verdict:
        if self._num_waiting >= MAX_WAITING:
            raise ServingError(f"{self._num_waiting} grammars wait to be checked", kind=ErrorKind.OVERLOADED)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._child.ask, kind, text)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Ends the child, whatever it is doing."""
        self._child.kill()
        self._pool.shutdown(cancel_futures=True)
        self._child.forget()


class _Child:
    """All methods but `kill` are called by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._command = [sys.executable, "-m", "server.grammar_child", str(directory)]
        self._process: subprocess.Popen[str] | None = None
        self._is_killed = False

    def ask(self, kind: AskedKind, text: str) -> Verdict:
        answer = self._exchange(self._running(), json.dumps([kind, text]))
        if not answer:
            return Verdict(None, self._cause_of_death())
        kind, text, reason = json.loads(answer)
        return Verdict(Grammar(kind, text)) if reason is None else Verdict(None, reason)  # type: ignore[arg-type]

    def kill(self) -> None:
        """From any thread. It is not started again."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def forget(self) -> int | None:
        """Its exit code, once it has ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        with process:
            process.kill()
        return process.returncode

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.forget()
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            if self._is_killed:
                self._process.kill()
            assert self._process.stdout is not None
            if self._process.stdout.readline().strip() != READY:
                raise ServingError(f"the grammar checker does not start, exit code {self.forget()}")
        return self._process

    def _exchange(self, process: subprocess.Popen[str], line: str) -> str:
        """Empty if it dies over it."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(line, file=process.stdin, flush=True)
            return process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _cause_of_death(self) -> str:
        process = self._process
        code = process.wait() if process is not None else None
        self.forget()
        if self._is_killed:
            raise ServingError("the server is shutting down", kind=ErrorKind.NO_NODE_READY)
        if code == -signal.SIGPROF:
            return f"compiling it takes longer than {CPU_SECONDS:g} s"
        return "it is too complex to be compiled"
