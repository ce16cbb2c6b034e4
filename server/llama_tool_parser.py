"""Llama 3: the whole answer is {"name": ..., "parameters": {...}}, with or without <|python_tag|>; several with ";"."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.json_tool_parser import JsonToolParser, write_call
from server.text_source import Reading


class LlamaToolParser(JsonToolParser):
    markers = ("<|python_tag|>",)
    openers = "{"

    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        yield from self.read_call_or_list()
        yield from source.skip_space()
        while (yield from source.accept(";")):
            yield from source.skip_space()
            yield from self.read_call()
            yield from source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "; ".join(write_call(name, arguments, "parameters") for name, arguments in calls)
