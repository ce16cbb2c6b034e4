"""The known formats of tool calls, and which of them a model speaks."""

from collections.abc import Collection

from engine.errors import ConfigError
from server.hermes_tool_parser import HermesToolParser
from server.llama_tool_parser import LlamaToolParser
from server.mistral_tool_parser import MistralToolParser
from server.pythonic_tool_parser import PythonicToolParser
from server.tool_parser import ToolParser

AUTO = "auto"
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": LlamaToolParser,
    "mistral": MistralToolParser,
    "pythonic": PythonicToolParser,
}
_SIGNS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "[func_name1(": "pythonic",
    "<|python_tag|>": "llama3_json",
}
"""What only templates or vocabularies of one format contain."""


def check_tool_parser(name: str) -> None:
    """Raises `ConfigError` that lists the known names."""
    if name not in (AUTO, *TOOL_PARSERS):
        known = ", ".join([AUTO, *sorted(TOOL_PARSERS)])
        raise ConfigError(f"--tool-call-parser must be one of {known}, got {name}")


def choose_tool_parser(name: str, template: str, tokens: Collection[str]) -> type[ToolParser]:
    """The parser for `--tool-call-parser`; `auto` goes by the chat template, then by the vocabulary, then takes Hermes'
    format, which models without one of their own are asked for.
    """
    check_tool_parser(name)
    if name != AUTO:
        return TOOL_PARSERS[name]
    by_template = (TOOL_PARSERS[known] for sign, known in _SIGNS.items() if sign in template)
    by_tokens = (TOOL_PARSERS[known] for sign, known in _SIGNS.items() if sign in tokens)
    return next(by_template, None) or next(by_tokens, HermesToolParser)
