"""The shape of one request's answer. What both endpoints share is here; `chat` and `completions` fill in the choices.

Events of a stream, in order: the opening (one first chunk per choice, if the endpoint has them), text, one finishing
chunk per choice, the usage chunk if asked for, and [DONE].
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from server.choice import Delta
from server.generation import Generation
from server.kv_transfer import FIELD, shown
from server.logprobs import prompt_logprobs
from server.prompts import Prompt
from server.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Whose answer it is, and what the client wants in it besides the text."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    num_per_prompt: int = 1
    num_generated_per_prompt: int = 1
    """More where only the best of them are shown."""
    num_top_logprobs: int | None = None
    """None: no logprobs at all."""
    num_top_prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    fingerprint: str | None = None
    """Of the software and the model; the same answer is to be expected only where it is the same."""


class Answer(ABC):
    """Turns deltas into response bytes."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(self, options: AnswerOptions, generation: Generation) -> None:
        self.options = options
        self.generation = generation
        self._id = f"{self.id_prefix}-{options.request_id}"
        self._created = int(time.time())
        # The same in every event, thus spelled once; the rest of the object follows.
        self._chunk_start = sse(self._header(self.chunk_object_name)).removesuffix(b"}\n\n") + b","

    @abstractmethod
    def opening_choices(self) -> list[dict[str, Any]]:
        """First chunk of each choice; [] where the stream starts with text."""

    @abstractmethod
    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """A choice in a stream chunk, less finish_reason and token ids."""

    @abstractmethod
    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        """A choice of a response in one piece, less finish_reason and token ids."""

    def chosen(self, wholes: list[Delta]) -> list[Delta]:
        """Those that the client sees."""
        return wholes

    def prompt_fields(self) -> dict[str, Any]:
        """Top-level fields about the prompt, for the opening of a stream or the whole response."""
        return {}

    def opening(self) -> bytes:
        extra = self.prompt_fields()
        return b"".join(self._event([choice], extra, num_output_tokens=0) for choice in self.opening_choices())

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self.delta_events(delta) for delta in deltas if delta.shows)

    def finish_reason(self, delta: Delta) -> str | None:
        """Why the choice ended, in the endpoint's words."""
        return delta.finish_reason

    def failed(self, error: dict[str, Any]) -> bytes:
        """The end of a stream that breaks off; `error` is as in a response of its own."""
        return sse(error) + DONE

    def closing(self) -> bytes:
        if not self.options.include_usage:
            return DONE
        header = {**self._header(self.chunk_object_name), **self._fingerprint()}
        return sse({**header, "choices": [], "usage": self._usage()}) + DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The response in one piece; `deltas` are all there were."""
        merged = [Delta(choice.index) for choice in self.generation.choices]
        for delta in deltas:
            _merge(merged[delta.index], delta)
        choices = [self._finished(self.whole_choice(whole), whole) for whole in self.chosen(merged)]
        body = {**self._header(self.object_name), **self._fingerprint(), "choices": choices, "usage": self._usage()}
        return orjson.dumps({**body, **self.prompt_fields(), **self._transfer_fields()})

    def _prompt_logprobs(self, choice_index: int, prompt: Prompt) -> list[orjson.Fragment | None] | None:
        """In vLLM's shape; None if not asked for."""
        num_top = self.options.num_top_prompt_logprobs
        if num_top is None:
            return None
        pieces = self.generation.choices[choice_index].prompt_logprobs
        return prompt_logprobs(prompt.token_ids, pieces, self.options.tokenizer, num_top)

    def _transfer_fields(self) -> dict[str, Any]:
        """Where the KV is held, if it is. Requests that ask for it have one choice, and never stream."""
        params = self.generation.choices[0].kv_transfer_params
        return {} if params is None else {FIELD: shown(params)}

    def delta_events(self, delta: Delta) -> bytes:
        """Usually one chunk. A finishing chunk carries the fingerprint unless the usage chunk will."""
        is_last = delta.finish_reason is not None and not self.options.include_usage
        return self._event([self._streamed(delta)], self._fingerprint() if is_last else {})

    def _fingerprint(self) -> dict[str, Any]:
        fingerprint = self.options.fingerprint
        return {} if fingerprint is None else {"system_fingerprint": fingerprint}

    def _streamed(self, delta: Delta) -> dict[str, Any]:
        choice = self.chunk_choice(delta)
        if delta.finish_reason is not None:
            return self._finished(choice, delta)
        choice["finish_reason"] = None
        return self._with_token_ids(choice, delta)

    def _finished(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        choice["finish_reason"] = self.finish_reason(delta)
        choice["stop_reason"] = delta.stop_reason
        return self._with_token_ids(choice, delta)

    def _with_token_ids(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        if self.options.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

    def _event(
        self,
        choices: list[dict[str, Any]],
        extra: Mapping[str, Any] = MappingProxyType({}),
        *,
        num_output_tokens: int | None = None,
    ) -> bytes:
        fields = {"choices": choices, **extra}
        if self.options.continuous_usage:
            fields["usage"] = self._usage(num_output_tokens)
        return self._chunk_start + orjson.dumps(fields)[1:] + b"\n\n"

    def _header(self, object_name: str) -> dict[str, Any]:
        return {"id": self._id, "object": object_name, "created": self._created, "model": self.options.model}

    def _usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        choices = self.generation.choices
        prompts = choices[:: self.options.num_generated_per_prompt]
        num_prompt = sum(choice.num_prompt_tokens for choice in prompts)
        if num_output_tokens is None:
            num_output_tokens = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in prompts)},
        }


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _merge(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.pieces += delta.pieces
    whole.tokens += delta.tokens
    if delta.finish_reason is not None:
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
