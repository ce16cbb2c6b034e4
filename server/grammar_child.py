"""Compiles grammars in a process of its own, to find out whether they can be compiled: `GrammarChecker`'s other end.

A grammar of a few kilobytes can keep llguidance busy for a minute, take gigabytes, or overflow the stack. Here that
ends a process that nothing else depends on. What compiled here compiles on a node, which has the same tokenizer and
limits and a larger stack.

    stdin, one line each    stdout, one line each
                            "ready"
    [kind, text]            [kind, text, reason]    reason is null for a grammar that compiles; kind and text are what
                                                    a node should be given, Lark where GBNF came
"""

import json
import resource
import signal
import sys
from pathlib import Path

from engine.grammar import Grammar, GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_source import lark_of

CPU_SECONDS = 2.0
"""For one grammar. Of its own time, so that a busy machine refuses no more than an idle one."""
START_SECONDS = 60
MEMORY_BYTES = 4 << 30
READY = '"ready"'


def main(directory: str) -> None:
    """Until stdin ends. Signals that nobody catches end it when a grammar takes too long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(START_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compiler = GrammarCompiler.of_checkpoint(Path(directory))
    signal.alarm(0)
    print(READY, flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = _check(compiler, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _check(compiler: GrammarCompiler, kind: str, text: str) -> tuple[str, str, str | None]:
    try:
        grammar = Grammar("lark", lark_of(text)) if kind == "grammar" else Grammar(kind, text)  # type: ignore[arg-type]
        compiler.compile(grammar)
    except GrammarError as error:
        return kind, text, str(error)
    return grammar.kind, grammar.text, None


if __name__ == "__main__":
    main(sys.argv[1])
