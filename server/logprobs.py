"""Log probabilities in the two shapes of OpenAI's API, and a prompt's in vLLM's.

What a long prompt brings is JSON position by position: as objects, twenty alternatives for each of its tokens would
take ten times the memory.
"""

import codecs
from collections.abc import Sequence
from itertools import chain
from typing import Any

import orjson

from engine.prompt_logprobs import PromptLogprob, PromptLogprobs
from engine.request import SampledToken
from server.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_entry(token, tokenizer, num_top) for token in tokens], "refusal": None}


def prompt_logprobs(
    token_ids: Sequence[int], pieces: Sequence[PromptLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[orjson.Fragment | None]:
    """`prompt_logprobs` as vLLM has it: for each token but the first a map by token id, the token's own entry first."""
    entries = zip(token_ids[1:], chain.from_iterable(pieces), strict=True)
    maps = (_prompt_entry(token_id, entry, tokenizer, num_top) for token_id, entry in entries)
    return [None, *(orjson.Fragment(orjson.dumps(by_token)) for by_token in maps)]


class CompletionLogprobs:
    """`logprobs` of one choice of a text completion. Keeps count of the text offset from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, token_ids: Sequence[int], pieces: Sequence[PromptLogprobs], echo: str) -> dict[str, Any]:
        """Of a prompt that is echoed as the text `echo`. The first token has none."""
        token_logprobs: list[float | None] = [None]
        top_logprobs: list[orjson.Fragment | None] = [None]
        for token_id, entry in zip(token_ids[1:], chain.from_iterable(pieces), strict=True):
            token_logprobs.append(_finite(entry.logprob))
            top = self._top(SampledToken(token_id, entry.logprob, entry.top_logprobs))
            top_logprobs.append(orjson.Fragment(orjson.dumps(top)))
        offsets = [self._advance_in(echo, token_id) for token_id in token_ids]
        self._offset = len(echo)
        return {
            "text_offset": offsets,
            "token_logprobs": token_logprobs,
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "top_logprobs": top_logprobs,
        }

    def add(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "text_offset": [self._advance(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "tokens": [self._tokenizer.token_text(token.token_id) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _advance(self, token_id: int) -> int:
        """Where this token's text starts; a token that continues a character starts where that does."""
        offset = self._offset
        if token_id not in self._hidden_ids:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset

    def _advance_in(self, echo: str, token_id: int) -> int:
        """A prompt may hold special tokens that its text spells out, and others that were put around it."""
        if token_id not in self._tokenizer.special_ids:
            return min(self._advance(token_id), len(echo))
        offset, spelled = self._offset, self._tokenizer.token_text(token_id)
        self._offset += len(spelled) if echo.startswith(spelled, offset) else 0
        return offset

    def _top(self, token: SampledToken) -> dict[str, float]:
        pairs = [*token.top_logprobs[: self._num_top], (token.token_id, token.logprob)]
        return {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in pairs}


def _prompt_entry(token_id: int, entry: PromptLogprob, tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    ranked = {token_id: (entry.logprob, entry.rank)}
    for rank, (other, logprob) in enumerate(entry.top_logprobs[:num_top], start=1):
        ranked.setdefault(other, (logprob, rank))
    return {
        str(key): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(key)}
        for key, (logprob, rank) in ranked.items()
    }


def _chat_entry(token: SampledToken, tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    top = [_token_entry(token_id, logprob, tokenizer) for token_id, logprob in token.top_logprobs[:num_top]]
    return {**_token_entry(token.token_id, token.logprob, tokenizer), "top_logprobs": top}


def _token_entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float | None) -> float:
    return LOWEST if logprob is None else max(logprob, LOWEST)
