"""From a `Grammar` to what llguidance compiles. Torch-free."""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.grammar import Grammar, GrammarError
from engine.schema_limits import refuse_unsound

# Enough of them that a schema's own `x-guidance` changes nothing: it could have unsupported keywords passed over.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}


def source_of(grammar: Grammar) -> str:
    """Raises `GrammarError` if the text is not of its kind; whether it makes sense is for the compiler to say."""
    match grammar.kind:
        case "json_schema":
            return _of_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_lark(_lark_of_choices(grammar.text))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def lark_of(text: str) -> str:
    """Lark for GBNF, and Lark as it is. Raises `GrammarError` for what is neither.

    Not for a node: 64 KiB of GBNF take seconds, and Python's lock all the while.
    """
    try:
        return any_to_lark(text)
    except Exception as error:
        # The converter raises plain `Exception` for whatever it cannot read.
        raise GrammarError(f"neither Lark nor GBNF: {error}") from error


def _of_schema(text: str) -> str:
    schema = _parse(text)
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    refuse_unsound(schema)
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        # Nested too deeply, or a number too large.
        raise GrammarError(f"the schema cannot be read: {error}") from error


def _lark_of_choices(text: str) -> str:
    choices = _parse(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("choices must be a list of strings, not empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from error
