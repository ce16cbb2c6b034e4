"""Compiles grammars for one model's tokenizer.

A compiled grammar is a matcher at its beginning, of which each request gets a copy. llguidance lets go of Python's lock
while it compiles, not while it reads the tokenizer: 0.5 s for 49,000 tokens.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from engine.grammar import Grammar, GrammarError
from engine.grammar_matcher import GrammarMatcher
from engine.grammar_source import source_of
from engine.model_config import ModelConfig

_LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,  # of a mask: about 1 ms
    "max_lexer_states": 10_000,  # up to 2 KiB each, kept as long as the grammar
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarCompiler:
    """Safe to call from any thread."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Raises `GrammarError` without a tokenizer.json that llguidance reads."""
        self._vocab_size = vocab_size
        self._limits = LLParserLimits(**_LIMITS)
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            num_tokens = Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
            # Ids beyond the model's are masked with the rest, and cut off.
            self._tokenizer = LLTokenizer(
                text, n_vocab=max(vocab_size, num_tokens), eos_token=sorted(eos_token_ids) or None
            )
        except Exception as error:  # tokenizers raises bare Exception
            raise GrammarError(
                f"the model has no tokenizer.json with which grammars can be followed: {error}"
            ) from error

    @classmethod
    def of_checkpoint(cls, directory: Path) -> "GrammarCompiler":
        config = ModelConfig.from_checkpoint(directory)
        return cls(directory, config.vocab_size, config.eos_token_ids)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Raises `GrammarError` with llguidance's reason.

        Not bounded in time, nor in stack: a few kilobytes can take a minute, or overflow 8 MiB. `server.grammar_child`
        exists to find that out.
        """
        compiled = LLMatcher(self._tokenizer, source_of(grammar), log_level=0, limits=self._limits)
        matcher = GrammarMatcher(compiled, self._vocab_size)
        if not compiled.is_error():
            # The first mask is the slowest.
            matcher.mask()
        if compiled.is_error():
            raise GrammarError(_words_of(compiled.get_error()))
        return matcher


def _words_of(reason: str) -> str:
    """Without the drawings of where in the source it is, which is ours and not the client's."""
    first, *others = reason.strip().splitlines()
    # It goes on with an option that clients do not have.
    first = first.partition(" Enable 'coerce_one_of'")[0]
    return " ".join([first, *(line.strip() for line in others if line.startswith("error:"))])
