"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or newer: [TOOL_CALLS]name[ARGS]{...} per call."""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from server.json_tool_parser import JsonToolParser, write_call
from server.text_source import Malformed, Reading

_NAME_RUN = re.compile(r"[\w.-]+")
_ID_RUN = re.compile(r"[a-zA-Z0-9]+")
_ID_LENGTH = 9
"""Its templates refuse other ids."""


class MistralToolParser(JsonToolParser):
    markers = ("[TOOL_CALLS]",)
    other_marks = ("[CALL_ID]", "[ARGS]")

    def new_call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))

    def read_calls(self, marker: str) -> Reading[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()) in ("[", "{"):
            yield from self.read_call_or_list()
        else:
            yield from self._read_named_call()
        yield from self.source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "[TOOL_CALLS][" + ", ".join(write_call(name, arguments) for name, arguments in calls) + "]"

    def _read_named_call(self) -> Reading[None]:
        source = self.source
        begin = source.position
        name = yield from source.take_run(_NAME_RUN)
        if (yield from source.accept("[CALL_ID]")):
            yield from source.take_run(_ID_RUN)
        yield from source.accept("[ARGS]")
        yield from source.skip_space()
        if name not in self.tool_names or (yield from source.peek()) != "{":
            source.position = begin
            raise Malformed
        yield from self.stream_arguments(name)
