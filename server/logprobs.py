"""Log probabilities in the two shapes of OpenAI's API."""

import codecs
from collections.abc import Sequence
from typing import Any

from engine.request import SampledToken
from server.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_entry(token, tokenizer, num_top) for token in tokens], "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one choice of a text completion. Keeps count of the text offset from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "text_offset": [self._advance(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "tokens": [self._tokenizer.token_text(token.token_id) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _advance(self, token: SampledToken) -> int:
        """Where this token's text starts; a token that continues a character starts where that does."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token.token_id)))
        return offset

    def _top(self, token: SampledToken) -> dict[str, float]:
        pairs = [*token.top_logprobs[: self._num_top], (token.token_id, token.logprob)]
        return {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in pairs}


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
