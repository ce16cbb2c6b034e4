"""From the fields that shape an output to a `Grammar`, checked before any node hears of the request."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import RequestError
from engine.grammar import Grammar, GrammarError, GrammarKind
from engine.grammar_source import check_grammar
from server.structured_protocol import StructuredFields, StructuredOutputs

MAX_CHECKED = 1024
ANY_OBJECT = '{"type":"object"}'


class GrammarChecker:
    """Checks grammars off the event loop, one at a time, and remembers what it found."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._found: OrderedDict[Grammar, str | None] = OrderedDict()

    async def read(self, fields: StructuredFields) -> Grammar | None:
        """Raises `RequestError` naming the field that is wrong."""
        wanted = _wanted(fields)
        if not wanted:
            return None
        if len(wanted) > 1:
            first, second = list(wanted)[:2]
            raise RequestError(f"{first} and {second} exclude each other", param=second)
        ((param, (kind, text)),) = wanted.items()
        return await self.checked(kind, text, param)

    async def read_schema(self, schema: Mapping[str, Any], param: str) -> Grammar:
        """Raises `RequestError` naming `param`."""
        return await self.checked("json_schema", _text(schema), param)

    async def checked(self, kind: GrammarKind, text: str, param: str) -> Grammar:
        """Raises `RequestError` naming `param`, with the compiler's reason."""
        try:
            grammar = Grammar(kind, text)
        except GrammarError as error:
            raise RequestError(f"{param}: {error}", param=param) from error
        if grammar not in self._found:
            reason = await asyncio.get_running_loop().run_in_executor(self._pool, _why_bad, grammar)
            self._found[grammar] = reason
            if len(self._found) > MAX_CHECKED:
                self._found.popitem(last=False)
        if (reason := self._found[grammar]) is not None:
            raise RequestError(f"{param}: {reason}", param=param)
        return grammar

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _why_bad(grammar: Grammar) -> str | None:
    try:
        check_grammar(grammar)
    except GrammarError as error:
        return str(error)
    return None


def _wanted(fields: StructuredFields) -> dict[str, tuple[GrammarKind, str]]:
    """By the name of the field that asks for it."""
    wanted: dict[str, tuple[GrammarKind, str]] = {}
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


def _of_structured_outputs(outputs: StructuredOutputs) -> dict[str, tuple[GrammarKind, str]]:
    path = "structured_outputs."
    wanted: dict[str, tuple[GrammarKind, str]] = {}
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
