"""Calls as JSON objects: {"name": ..., "arguments": {...}}, or "parameters" as Llama says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.json_reader import is_object, read_string, read_value, skip_key
from server.text_source import EndedEarly, Malformed, Reading
from server.tool_parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Call:
    """A call as far as it has been read."""

    name: str | None = None
    arguments: str | None = None
    """Of a call not announced yet, because its name comes behind them."""
    is_announced: bool = False


class JsonToolParser(ToolParser):
    """What formats that write calls as JSON share."""

    def read_call_or_list(self) -> Reading[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_call()

    def read_list(self) -> Reading[None]:
        """[call, ...]. An empty list is well-formed and holds no call."""
        source = self.source
        yield from source.expect("[")
        yield from source.skip_space()
        while not (yield from source.accept("]")):
            yield from self.read_call()
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                yield from source.accept("]")
                return
            yield from source.skip_space()

    def read_call(self) -> Reading[None]:
        """One call. What is none leaves the source where the object begins."""
        call = _Call()
        begin = self.source.position
        try:
            yield from self._read_members(call)
        except Malformed:
            if not call.is_announced:
                self.source.position = begin
            raise

    def stream_arguments(self, name: str) -> Reading[None]:
        """Announces a call of `name` and gives out the object that follows while it arrives."""
        source, index = self.source, self.announce(name)
        source.forget()
        try:
            for _ in read_value(source):
                self._hand_on(index)
                yield
        except EndedEarly:
            source.take(len(source.rest))
        except Malformed:
            self._hand_on(index)
            raise
        self._hand_on(index)

    def _hand_on(self, index: int) -> None:
        self.add_arguments(index, self.source.text[: self.source.position])
        self.source.forget()

    def _read_members(self, call: _Call) -> Reading[None]:
        source = self.source
        yield from source.expect("{")
        yield from source.skip_space()
        while True:
            key = yield from read_string(source)
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            yield from self._read_member(call, key)
            if call.is_announced:
                yield from self._skip_rest()
                return
            yield from source.skip_space()
            if (yield from source.accept("}")):
                self._announce_whole(call)
                return
            yield from source.expect(",")
            yield from source.skip_space()

    def _skip_rest(self) -> Reading[None]:
        """What follows the arguments in their object. If it is not right it is left to be content."""
        source = self.source
        begin = source.position
        try:
            yield from source.skip_space()
            while (yield from source.accept(",")):
                yield from source.skip_space()
                yield from skip_key(source)
                yield from read_value(source)
                yield from source.skip_space()
            yield from source.accept("}")
        except Malformed:
            source.position = begin

    def _read_member(self, call: _Call, key: str) -> Reading[None]:
        if key == "name" and call.name is None:
            call.name = yield from read_string(self.source)
            if call.name not in self.tool_names:
                raise Malformed
        elif key in _ARGUMENTS and call.arguments is None:
            yield from self._read_arguments(call)
        elif key == "name" or key in _ARGUMENTS:
            raise Malformed
        else:
            yield from read_value(self.source)

    def _read_arguments(self, call: _Call) -> Reading[None]:
        source = self.source
        character = yield from source.peek()
        if character == "{" and call.name is not None:
            call.is_announced = True
            yield from self.stream_arguments(call.name)
        elif character == '"':
            # Some models write the object as text within the object.
            call.arguments = yield from read_string(source)
        elif (yield from source.accept("null")):
            call.arguments = "{}"
        else:
            begin = source.position
            yield from read_value(source)
            call.arguments = source.text[begin : source.position]
        if not call.is_announced and not is_object(call.arguments or ""):
            raise Malformed

    def _announce_whole(self, call: _Call) -> None:
        if call.name is None:
            raise Malformed
        call.is_announced = True
        self.add_arguments(self.announce(call.name), "{}" if call.arguments is None else call.arguments)


def write_call(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    """One call as its object."""
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)
