"""Calls of answers that can be nothing else, because decoding was constrained (`tool_constraint`)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.json_tool_parser import JsonToolParser, write_call
from server.text_source import Reading


class RequiredToolParser(JsonToolParser):
    """The whole answer is a list of calls."""

    openers = "["

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.read_list()
        yield from self.source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "[" + ", ".join(write_call(name, arguments) for name, arguments in calls) + "]"


class NamedToolParser(JsonToolParser):
    """The whole answer is the arguments of one function."""

    openers = "{"

    def __init__(self, tool_names: Iterable[str], *, max_calls: int | None = None) -> None:
        super().__init__(tool_names, max_calls=max_calls)
        (self._name,) = self.tool_names

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.stream_arguments(self._name)
        yield from self.source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        ((_, arguments),) = calls
        return json.dumps(arguments, ensure_ascii=False)
