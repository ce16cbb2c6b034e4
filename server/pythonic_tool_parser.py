"""Pythonic: [get_weather(city="Paris"), get_time()], as the whole answer or behind <|python_start|> (Llama 4)."""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from server.text_source import EndedEarly, Malformed, Reading
from server.tool_parser import ToolParser

_NAME_RUN = re.compile(r"[\w.-]+")
_PLAIN_RUN = re.compile(r"[^\"'()\[\]{}]+")
_STRINGS = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\.)+", re.DOTALL) for quote in "\"'"}
END = "<|python_end|>"
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicToolParser(ToolParser):
    """A call is announced once it is whole: its values must be translated to JSON."""

    markers = ("<|python_start|>",)
    other_marks = (END,)
    openers = "["

    def read_calls(self, marker: str) -> Reading[None]:
        source = self.source
        yield from source.skip_space()
        yield from source.expect("[")
        yield from source.skip_space()
        while not (yield from source.accept("]")):
            yield from self._read_call()
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                yield from source.accept("]")
                break
            yield from source.skip_space()
        yield from source.skip_space()
        if (yield from source.accept(END, closes=True)):
            yield from source.skip_space()

    @staticmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "[" + ", ".join(_written(name, arguments) for name, arguments in calls) + "]"

    def _read_call(self) -> Reading[None]:
        source = self.source
        begin = source.position
        try:
            name = yield from source.take_run(_NAME_RUN)
            if name not in self.tool_names:
                raise Malformed
            at = source.position
            yield from self._skip_parentheses()
            arguments = _arguments_of(source.text[at : source.position])
        except Malformed:
            source.position = begin
            raise
        self.add_arguments(self.announce(name), arguments)
        source.forget()

    def _skip_parentheses(self) -> Reading[None]:
        source, depth = self.source, 0
        while True:
            character = yield from source.peek()
            if not character or (depth == 0 and character != "("):
                raise EndedEarly if not character else Malformed
            if character in _STRINGS:
                yield from self._skip_string(character)
            elif source.take_match(_PLAIN_RUN):
                continue
            else:
                source.take(1)
                depth += 1 if character in "([{" else -1
            if depth == 0:
                return

    def _skip_string(self, quote: str) -> Reading[None]:
        source = self.source
        source.take(1)
        while (character := (yield from source.peek())) != quote:
            if not character:
                raise EndedEarly
            if not source.take_match(_STRINGS[quote]):
                if character != "\\" or source.ended:
                    raise Malformed
                yield
        source.take(1)


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _arguments_of(parentheses: str) -> str:
    """`(city="Paris", days=2)` as a JSON object."""
    try:
        with warnings.catch_warnings():
            # Of odd escapes in strings, which are the model's and not ours.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{parentheses}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        arguments = {_name_of(keyword): _value_of(keyword.value) for keyword in call.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error
    return text


def _name_of(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise Malformed
    return keyword.arg


def _value_of(node: ast.expr) -> Any:
    """A literal's value. JSON's own words for constants occur as well."""
    return ast.literal_eval(_ConstantWords().visit(node))


class _ConstantWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_CONSTANTS:
            return ast.copy_location(ast.Constant(_JSON_CONSTANTS[node.id]), node)
        return node
