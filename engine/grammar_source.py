"""From a `Grammar` to what llguidance compiles. Torch-free: the server checks with it before a node hears of it."""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.grammar import Grammar, GrammarError

_JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": " ?", "lenient": False}


def source_of(grammar: Grammar) -> str:
    """Raises `GrammarError` if the text is not of its kind; whether it makes sense is for the compiler to say."""
    match grammar.kind:
        case "json_schema":
            return _of_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_lark(_lark_of_choices(grammar.text))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark_of(grammar.text))


def check_grammar(grammar: Grammar) -> None:
    """Raises `GrammarError` if it cannot be compiled. Takes up to seconds for a large one."""
    reason = LLMatcher.validate_grammar(source_of(grammar))
    if reason and not reason.startswith("WARNING"):
        raise GrammarError(reason.strip())


def _of_schema(text: str) -> str:
    schema = _parse(text)
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    # A client's own options for the compiler could make it pass over what it does not support.
    schema.pop("x-guidance", None)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def _lark_of_choices(text: str) -> str:
    choices = _parse(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("choices must be a list of strings, not empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _lark_of(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:
        # The converter raises plain `Exception` for whatever it cannot read.
        raise GrammarError(f"the grammar cannot be read: {error}") from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from error
