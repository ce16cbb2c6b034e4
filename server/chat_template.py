"""Renders a conversation to the text the model was trained on, with the conventions of transformers' chat templates.

Templates come with checkpoints and are run in a sandbox; what they see is plain JSON data.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import ConfigError, RequestError

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, object] | None = None) -> None:
        """Raises `ConfigError` if the template does not compile."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """What the template reads: without `tools`, say, it cannot show any."""
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"--model: the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `RequestError` where the template refuses the conversation."""
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            _tag_final_message(chat)
        names = {**self.special_tokens, **(extra or {}), "tools": list(tools) or None, "messages": chat}
        names |= {"documents": list(documents) or None, "add_generation_prompt": add_generation_prompt}
        text = self._run(names)
        return _cut_at_tag(text) if continue_final_message else text

    def _run(self, names: Mapping[str, Any]) -> str:
        try:
            return self._template.render(names)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


class ChatTemplates:
    """A checkpoint's template, and the one for conversations with tools where it has two."""

    def __init__(self, default: ChatTemplate, tool_use: ChatTemplate | None = None) -> None:
        self.default = default
        self.tool_use = tool_use or default

    def for_tools(self, has_tools: bool) -> ChatTemplate:
        return self.tool_use if has_tools else self.default


def load_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplates | None:
    """The checkpoint's template: `chat_template.jinja` before the one inside `tokenizer_config.json`."""
    sources = _template_sources(directory, tokenizer_config)
    tokens = special_tokens(tokenizer_config)
    compiled = {name: ChatTemplate(sources[name], tokens) for name in ("default", "tool_use") if name in sources}
    return ChatTemplates(compiled["default"], compiled.get("tool_use")) if "default" in compiled else None


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, object]:
    """`bos_token`, `eos_token` and so on, as templates name them."""
    found: dict[str, object] = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_sources(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; most checkpoints have only the default."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return {"default": source} if isinstance(source, str) else {}


def _tag_final_message(chat: list[dict[str, Any]]) -> None:
    if not isinstance(chat[-1].get("content"), str):
        raise RequestError("continue_final_message needs a last message with content", param="continue_final_message")
    chat[-1]["content"] += CONTINUE_TAG


def _cut_at_tag(text: str) -> str:
    """`text` up to the end of the final message. Templates that trim content also trimmed the tag's own space."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError("the chat template drops the final message", param="continue_final_message")
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  the name and type are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """`dict(...)` without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(...)` that refuses names which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template namespace cannot hold {name!r}")


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which prompts must not contain.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
