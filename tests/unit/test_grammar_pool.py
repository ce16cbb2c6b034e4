"""Grammars compiled beside the step loop: kept, shared, woken for, and in nobody's way."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import grammar_pool
from engine.grammar import Grammar, GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_matcher import GrammarMatcher
from engine.grammar_pool import GrammarPool
from tests.tiny_models import VOCAB_SIZE, save_tokenizer

TIMEOUT = 10


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return GrammarCompiler(directory, VOCAB_SIZE, [1])


class SlowCompiler:
    """Compiles; the text "slow" only when told."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.texts: list[str] = []
        self.may_go_on = threading.Event()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        self.texts.append(grammar.text)
        if grammar.text == "slow":
            assert self.may_go_on.wait(TIMEOUT)
        return self.compiler.compile(grammar)


@pytest.fixture
def slow(compiler: GrammarCompiler) -> SlowCompiler:
    return SlowCompiler(compiler)


@pytest.fixture
def woken() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def pool(slow: SlowCompiler, woken: threading.Semaphore) -> Iterator[GrammarPool]:
    pool = GrammarPool(lambda: slow, woken.release)  # type: ignore[arg-type, return-value]
    yield pool
    slow.may_go_on.set()
    pool.close(TIMEOUT)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grammars")]


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def test_no_thread_until_there_is_a_grammar(pool: GrammarPool) -> None:
    assert pool._threads == []


def test_each_grammar_is_compiled_once(pool: GrammarPool, slow: SlowCompiler, woken: threading.Semaphore) -> None:
    first = pool.find(regex("a+"))
    assert pool.find(regex("a+")) is first
    assert woken.acquire(timeout=TIMEOUT)
    assert first.done(), "woken for nothing"
    assert pool.find(Grammar("choice", '["a+"]')) is not first
    assert slow.texts[0] == "a+"
    assert slow.texts.count("a+") == 1


def test_a_slow_one_holds_up_nobody(pool: GrammarPool, slow: SlowCompiler) -> None:
    late = pool.find(regex("slow"))
    assert pool.find(regex("quick")).result(TIMEOUT)
    assert not late.done()
    slow.may_go_on.set()
    assert late.result(TIMEOUT)


def test_the_least_recently_used_is_dropped(
    pool: GrammarPool, slow: SlowCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "MAX_COMPILED", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        pool.find(regex(text)).result(TIMEOUT)
    assert sorted(slow.texts) == ["a", "b", "b", "c"]


def test_a_failure_is_kept_too_and_wakes(pool: GrammarPool, slow: SlowCompiler, woken: threading.Semaphore) -> None:
    for _ in range(2):
        error = pool.find(regex("a(")).exception(TIMEOUT)
        assert isinstance(error, GrammarError)
        assert error.__traceback__ is None, "it would keep the frames, and what is in them, alive"
    assert slow.texts == ["a("]
    assert woken.acquire(timeout=TIMEOUT)


def test_without_a_tokenizer_every_grammar_fails_and_the_node_starts(tmp_path: Path) -> None:
    pool = GrammarPool(lambda: GrammarCompiler(tmp_path, VOCAB_SIZE, [1]), lambda: None)
    for text in ("a", "b"):
        assert "tokenizer.json" in str(pool.find(regex(text)).exception(TIMEOUT))
    pool.close()


def test_long_chains_of_rules_do_not_overflow_the_stack(compiler: GrammarCompiler) -> None:
    """Ten times the server's stack, so that what its check let through is safe here."""
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2500)) + '\nr2500: "a"'
    pool = GrammarPool(lambda: compiler, lambda: None)
    assert pool.find(Grammar("lark", chain)).result(TIMEOUT)
    pool.close(TIMEOUT)


def test_compiling_lets_other_threads_run(compiler: GrammarCompiler) -> None:
    """llguidance lets go of Python's lock: nothing else here would give it to this thread before the end."""
    names = [f"p{i}" for i in range(1500)]
    properties = ",".join(f'"{name}":{{"type":"integer"}}' for name in names)
    text = f'{{"type":"object","properties":{{{properties}}},"required":{json.dumps(names)}}}'
    began = threading.Event()

    class Compiler:
        def compile(self, grammar: Grammar) -> GrammarMatcher:
            began.set()
            return compiler.compile(grammar)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        pool = GrammarPool(Compiler, lambda: None)  # type: ignore[arg-type]
        compiled = pool.find(Grammar("json_schema", text))
        assert began.wait(TIMEOUT)
        assert not compiled.done()
    finally:
        sys.setswitchinterval(interval)
    compiled.result(TIMEOUT)
    pool.close(TIMEOUT)
