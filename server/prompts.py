"""From request bodies to token ids. Long texts are tokenized off the event loop, and over-long ones not at all."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import ConfigError, RequestError
from server.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplates
from server.model_assets import ModelAssets
from server.protocol import ChatMessage, CompletionBody, TemplateFields
from server.tool_prompt import with_tools_as_text

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

    def __init__(self, assets: ModelAssets, *, trusts_templates: bool = False) -> None:
        self._assets = assets
        self._trusts_templates = trusts_templates

    async def read_completion(
        self, body: CompletionBody, max_model_len: int, max_prompt_len: int | None = None
    ) -> list[Prompt]:
        """Of longer prompts the last `max_prompt_len` tokens; None refuses what is longer than the model takes."""
        add_special = body.add_special_tokens is not False
        return [await self._read_prompt(prompt, add_special, max_model_len, max_prompt_len) for prompt in body.prompt]

    async def read_text(self, text: str, max_model_len: int | None, *, add_special_tokens: bool = True) -> Prompt:
        self._check_length(len(text), max_model_len, "prompt")
        encode = self._assets.tokenizer.encode
        return _checked(
            Prompt(await _off_loop(len(text), lambda: encode(text, add_special_tokens=add_special_tokens)), text),
            "prompt",
        )

    async def read_chat(
        self,
        messages: Sequence[ChatMessage],
        fields: TemplateFields,
        max_model_len: int,
        max_prompt_len: int | None = None,
    ) -> Prompt:
        num_chars = sum(len(message.content or "") for message in messages)
        self._check_length(num_chars, max_model_len if max_prompt_len is None else None, "messages")
        if fields.chat_template is not None:
            # It may do anything for any length of time: not in front of everybody else.
            token_prompt = await asyncio.to_thread(self._render, messages, fields)
        else:
            num_chars += _num_json_chars(messages, fields)
            token_prompt = await _off_loop(num_chars, lambda: self._render(messages, fields))
        return _truncated(_checked(token_prompt, "messages"), max_prompt_len)

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

    async def _read_prompt(
        self, prompt: str | list[int], add_special_tokens: bool, max_model_len: int, max_prompt_len: int | None
    ) -> Prompt:
        if isinstance(prompt, str):
            limit = max_model_len if max_prompt_len is None else None
            return _truncated(
                await self.read_text(prompt, limit, add_special_tokens=add_special_tokens), max_prompt_len
            )
        # Others' tokens go on between two prompts of a large batch.
        await asyncio.sleep(0)
        kept = prompt if max_prompt_len is None else prompt[-max_prompt_len:]
        return self.read_token_ids(kept, "prompt", max_model_len)

    def _render(self, messages: Sequence[ChatMessage], fields: TemplateFields) -> Prompt:
        tools = fields.shown_tools()
        template = self._template(fields, has_tools=bool(tools))
        if fields.add_generation_prompt and fields.continue_final_message:
            rule = "continue_final_message excludes add_generation_prompt; set the latter to false"
            raise RequestError(rule, param="continue_final_message")
        if fields.documents and "documents" not in template.names:
            raise RequestError("this model's chat template does not take documents", param="documents")
        chat = [message.for_template() for message in messages]
        if "tools" not in template.names:
            chat, tools = with_tools_as_text(chat, tools, self._assets.tool_parser), []
        text = template.render(
            chat,
            tools=tools,
            documents=fields.documents or (),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            extra=_template_names(fields.chat_template_kwargs or {}),
        )
        ids = self._assets.tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))
        return Prompt(ids, text)

    def _template(self, fields: TemplateFields, *, has_tools: bool) -> ChatTemplate:
        templates = self._assets.chat_templates
        if fields.chat_template is not None:
            if not self._trusts_templates:
                rule = "chat_template needs the server's flag --trust-request-chat-template"
                raise RequestError(rule, param="chat_template")
            return _request_template(fields.chat_template, templates)
        if templates is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return templates.for_tools(has_tools)

    def _check_length(self, num_chars: int, max_model_len: int | None, param: str) -> None:
        """Refuses a text that has too many tokens even if each is the longest there is."""
        if max_model_len is None:
            return
        longest = max_model_len * self._assets.tokenizer.max_token_chars
        if num_chars > longest:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens, at most {longest} characters, "
                f"but {param} has {num_chars} characters.",
                param=param,
            )


def max_prompt_len(truncate_to: int | None, max_tokens: int | None, max_model_len: int) -> int | None:
    """How many of its last tokens a prompt keeps, by `truncate_prompt_tokens`. Raises `RequestError`."""
    if truncate_to is None:
        return None
    if truncate_to == 0 or truncate_to > max_model_len:
        rule = f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {truncate_to}"
        raise RequestError(rule, param="truncate_prompt_tokens")
    return truncate_to if truncate_to > 0 else max(1, max_model_len - max(1, max_tokens or 1))


def _truncated(prompt: Prompt, max_len: int | None) -> Prompt:
    if max_len is None or len(prompt.token_ids) <= max_len:
        return prompt
    return Prompt(prompt.token_ids[-max_len:])


def _checked(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise RequestError(f"{param} must not be empty", param=param)
    return prompt


def _num_json_chars(messages: Sequence[ChatMessage], fields: TemplateFields) -> int:
    """About how much there is to render besides the messages' text."""
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    tools = [(tool.function.description, tool.function.parameters) for tool in fields.tools or ()]
    return sum(len(str(value)) for value in (calls, tools, fields.documents) if value)


def _request_template(source: str, templates: ChatTemplates | None) -> ChatTemplate:
    try:
        return ChatTemplate(source, None if templates is None else templates.default.special_tokens)
    except ConfigError as error:
        raise RequestError(f"chat_template: {error.__cause__}", param="chat_template") from error


def _template_names(extra: dict[str, Any]) -> dict[str, Any]:
    if taken := extra.keys() & RESERVED_NAMES:
        raise RequestError(f"chat_template_kwargs cannot set {sorted(taken)}", param="chat_template_kwargs")
    return extra


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(work)
