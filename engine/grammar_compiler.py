"""Compiles grammars beside the step loop, and keeps what it compiled.

A compiled grammar is a matcher at its beginning, of which each request gets a copy. llguidance lets go of Python's lock
while it compiles, and limits what a grammar may cost.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from engine.grammar import Grammar, GrammarError
from engine.grammar_matcher import GrammarMatcher
from engine.grammar_source import source_of

logger = logging.getLogger(__name__)

MAX_COMPILED = 256
NUM_THREADS = 1
"""One: on a node with few cores the forward needs the others."""


class GrammarCompiler:
    """All methods are called by the engine's thread; `on_ready` by the compiler's own."""

    def __init__(
        self, directory: Path, vocab_size: int, eos_token_ids: Iterable[int], on_ready: Callable[[], None]
    ) -> None:
        """The tokenizer is read with the first grammar."""
        self._tokenizer_file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._on_ready = on_ready
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = Lock()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")

    def find(self, grammar: Grammar) -> Future[LLMatcher]:
        """The compiled grammar, or one that will be; its failure is a `GrammarError`."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
            future.add_done_callback(lambda _: self._on_ready())
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return future

    def matcher_of(self, compiled: LLMatcher) -> GrammarMatcher:
        return GrammarMatcher(compiled, self._vocab_size)

    def close(self) -> None:
        """What is being compiled ends in its own time; nothing waits for it but the process's exit."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer_of_model(), source_of(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return matcher

    def _tokenizer_of_model(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if not self._tokenizer_file.is_file():
                    raise GrammarError("the model has no tokenizer.json, without which no grammar can be followed")
                self._tokenizer = LLTokenizer(
                    str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                )
            return self._tokenizer
