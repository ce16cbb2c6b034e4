"""What a chat request wants of tools: whether calls can come, which, and how they are read from the text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from server.forced_tool_parser import NamedToolParser, RequiredToolParser
from server.protocol import ChatBody
from server.tool_constraint import schema_of_calls
from server.tool_parser import ToolParser
from server.tool_protocol import ToolBody, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """For a request in whose answer calls may come."""

    tools: tuple[ToolBody, ...]
    choice: ToolChoice
    max_calls: int | None = None
    """None: as many as the model likes."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)

    def make_parser(self, of_model: type[ToolParser]) -> ToolParser:
        """A new one, for one choice; `of_model` reads what the model writes of its own accord."""
        match self.choice.mode:
            case "named":
                return NamedToolParser(self.names, max_calls=self.max_calls)
            case "required":
                return RequiredToolParser(self.names, max_calls=self.max_calls)
            case _:
                return of_model(self.names, max_calls=self.max_calls)

    def output_schema(self) -> Mapping[str, Any] | None:
        """JSON schema that the whole answer must meet, so that it can be nothing but calls; None if it is free."""
        if self.choice.mode == "auto":
            return None
        return schema_of_calls(self.tools, is_single_call=self.choice.mode == "named", max_calls=self.max_calls)


@dataclass(frozen=True, slots=True)
class ToolReading:
    """How the calls of one request are found in the text of a model."""

    use: ToolUse
    of_model: type[ToolParser]
    marker_ids: frozenset[int] = frozenset()
    """Special tokens that are not to be skipped, because they mark calls."""

    def make_parser(self) -> ToolParser:
        return self.use.make_parser(self.of_model)


def tool_use_of(body: ChatBody) -> ToolUse | None:
    """None where no calls can come. Raises `RequestError` for a choice that does not fit the tools."""
    tools = tuple(body.tools or ())
    choice = body.tool_choice or ToolChoice("auto" if tools else "none")
    if choice.mode in ("required", "named") and not tools:
        raise RequestError(f"tool_choice {choice.mode} needs tools", param="tool_choice")
    if choice.mode == "named":
        tools = tuple(tool for tool in tools if tool.function.name == choice.name)[:1]
        if not tools:
            raise RequestError(f"tool_choice names {choice.name!r}, which is not in tools", param="tool_choice")
    if choice.mode == "none" or not tools:
        return None
    return ToolUse(tools=tools, choice=choice, max_calls=1 if body.parallel_tool_calls is False else None)
