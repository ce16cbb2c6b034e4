"""Hermes, Qwen, SmolLM: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list of calls in the tags."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.json_tool_parser import JsonToolParser, write_call
from server.text_source import Reading

END = "</tool_call>"


class HermesToolParser(JsonToolParser):
    markers = ("<tool_call>",)
    other_marks = (END,)

    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        yield from self.read_call_or_list()
        yield from source.skip_space()
        # Some models leave the end out.
        if (yield from source.accept(END, closes=True)):
            yield from source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "\n".join(f"<tool_call>\n{write_call(name, arguments)}\n{END}" for name, arguments in calls)
