"""From the fields that shape an output to a `Grammar`, checked before any node hears of the request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.grammar import Grammar
from server.grammar_checker import AskedKind, GrammarChecker
from server.structured_protocol import StructuredFields, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'

Wanted = dict[str, tuple[AskedKind, str]]
"""By the name of the field that asks for it."""


class GrammarReader:
    """Reads requests' grammars; each is checked before any node hears of it."""

    def __init__(self, directory: Path) -> None:
        """`directory` of the model, whose tokenizer the check needs."""
        self._checker = GrammarChecker(directory)

    async def read(self, fields: StructuredFields) -> Grammar | None:
        """Raises `RequestError` naming the field that is wrong."""
        wanted = _wanted(fields)
        if not wanted:
            return None
        if len(wanted) > 1:
            first, second = list(wanted)[:2]
            raise RequestError(f"{first} and {second} exclude each other", param=second)
        ((param, (kind, text)),) = wanted.items()
        return await self._checker.check(kind, text, param)

    async def read_schema(self, schema: Mapping[str, Any], param: str) -> Grammar:
        """Raises `RequestError` naming `param`."""
        return await self._checker.check("json_schema", _text(schema), param)

    def close(self) -> None:
        """Ends the check that is going on, if there is one."""
        self._checker.close()


def _wanted(fields: StructuredFields) -> Wanted:
    wanted: Wanted = {}
    response_format = fields.response_format
    if response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise RequestError("response_format.json_schema is required", param="response_format.json_schema")
        wanted["response_format"] = ("json_schema", _text(response_format.json_schema.json_schema))
    elif response_format is not None and response_format.type == "json_object":
        wanted["response_format"] = ("json_schema", ANY_OBJECT)
    if fields.structured_outputs is not None:
        wanted |= _of_structured_outputs(fields.structured_outputs)
    if fields.guided_json is not None:
        wanted["guided_json"] = ("json_schema", _text(fields.guided_json))
    if fields.guided_regex is not None:
        wanted["guided_regex"] = ("regex", fields.guided_regex)
    if fields.guided_choice is not None:
        wanted["guided_choice"] = ("choice", _text(fields.guided_choice))
    if fields.guided_grammar is not None:
        wanted["guided_grammar"] = ("grammar", fields.guided_grammar)
    return wanted


def _of_structured_outputs(outputs: StructuredOutputs) -> Wanted:
    path = "structured_outputs."
    wanted: Wanted = {}
    if outputs.json_schema is not None:
        wanted[path + "json"] = ("json_schema", _text(outputs.json_schema))
    if outputs.json_object:
        wanted[path + "json_object"] = ("json_schema", ANY_OBJECT)
    if outputs.regex is not None:
        wanted[path + "regex"] = ("regex", outputs.regex)
    if outputs.choice is not None:
        wanted[path + "choice"] = ("choice", _text(outputs.choice))
    if outputs.grammar is not None:
        wanted[path + "grammar"] = ("grammar", outputs.grammar)
    return wanted


def _text(value: Any) -> str:
    """The same for equal values, so that a grammar is compiled once; in the order given, which the output follows."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
