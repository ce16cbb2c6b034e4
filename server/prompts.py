"""From request bodies to token ids. Long texts are tokenized off the event loop, and over-long ones not at all."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import RequestError
from server.chat_template import RESERVED_NAMES
from server.model_assets import ModelAssets
from server.protocol import ChatMessage, CompletionBody, TemplateFields

MAX_INLINE_CHARS = 2000
"""About a millisecond of tokenizing; anything longer would hold up other requests' tokens."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized."""

    token_ids: Sequence[int]
    text: str | None = None
    """None where the client sent token ids."""


class PromptReader:
    """Raises `RequestError` naming the field for everything that is no prompt of this model."""

    def __init__(self, assets: ModelAssets) -> None:
        self._assets = assets

    async def read_completion(self, body: CompletionBody, max_model_len: int) -> list[Prompt]:
        add_special = body.add_special_tokens is not False
        return [await self._read_prompt(prompt, add_special, max_model_len) for prompt in body.prompt]

    async def read_text(self, text: str, max_model_len: int, *, add_special_tokens: bool = True) -> Prompt:
        self._check_length(len(text), max_model_len, "prompt")
        encode = self._assets.tokenizer.encode
        return _checked(
            Prompt(await _off_loop(len(text), lambda: encode(text, add_special_tokens=add_special_tokens)), text),
            "prompt",
        )

    async def read_chat(self, messages: Sequence[ChatMessage], fields: TemplateFields, max_model_len: int) -> Prompt:
        num_chars = sum(len(message.content or "") for message in messages)
        self._check_length(num_chars, max_model_len, "messages")
        return _checked(await _off_loop(num_chars, lambda: self._render(messages, fields)), "messages")

    def read_token_ids(self, token_ids: Sequence[int], param: str, max_model_len: int) -> Prompt:
        """Of a prompt that the client tokenized. Too many of them are refused unseen."""
        if len(token_ids) > max_model_len:
            rule = f"This model's maximum context length is {max_model_len} tokens, but {param} has {len(token_ids)}."
            raise RequestError(rule, param=param)
        # The type itself: true and false are integers to Python.
        if set(map(type, token_ids)) != {int}:
            raise RequestError(f"{param}: token ids must be integers", param=param)
        for extreme in (min(token_ids), max(token_ids)):
            if not 0 <= extreme < self._assets.vocab_size:
                rule = f"token ids must be in [0, {self._assets.vocab_size - 1}], got {extreme}"
                raise RequestError(f"{param}: {rule}", param=param)
        return Prompt(token_ids)

    async def _read_prompt(self, prompt: str | list[int], add_special_tokens: bool, max_model_len: int) -> Prompt:
        if isinstance(prompt, str):
            return await self.read_text(prompt, max_model_len, add_special_tokens=add_special_tokens)
        # Others' tokens go on between two prompts of a large batch.
        await asyncio.sleep(0)
        return self.read_token_ids(prompt, "prompt", max_model_len)

    def _render(self, messages: Sequence[ChatMessage], fields: TemplateFields) -> Prompt:
        template = self._assets.chat_template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        if fields.add_generation_prompt and fields.continue_final_message:
            rule = "continue_final_message excludes add_generation_prompt; set the latter to false"
            raise RequestError(rule, param="continue_final_message")
        text = template.render(
            [message.for_template() for message in messages],
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            extra=_template_names(fields.chat_template_kwargs or {}),
        )
        ids = self._assets.tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))
        return Prompt(ids, text)

    def _check_length(self, num_chars: int, max_model_len: int, param: str) -> None:
        """Refuses a text that has too many tokens even if each is the longest there is."""
        longest = max_model_len * self._assets.tokenizer.max_token_chars
        if num_chars > longest:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens, at most {longest} characters, "
                f"but {param} has {num_chars} characters.",
                param=param,
            )


def _checked(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise RequestError(f"{param} must not be empty", param=param)
    return prompt


def _template_names(extra: dict[str, Any]) -> dict[str, Any]:
    if taken := extra.keys() & RESERVED_NAMES:
        raise RequestError(f"chat_template_kwargs cannot set {sorted(taken)}", param="chat_template_kwargs")
    return extra


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(work)
