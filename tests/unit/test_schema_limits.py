"""Schemas that would be followed wrongly are refused, their neighbours are not."""

import pytest

from engine.grammar import Grammar, GrammarError
from engine.grammar_source import source_of
from engine.schema_limits import refuse_unsound


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "minimum": 1e20}, "minimum"),
        ({"type": "number", "exclusiveMaximum": -(2**54)}, "exclusiveMaximum"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"type": ["number", "null"], "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "exclusiveMinimum"),
        ({"type": "number", "minimum": -0.01, "exclusiveMaximum": 0}, "exclusiveMaximum"),
        ({"patternProperties": {"^a$": {}}, "minProperties": 2, "additionalProperties": False}, "minProperties"),
        ({"minProperties": 3, "required": ["a", "b"]}, "minProperties"),
    ],
)
def test_refused_wherever_it_stands(schema: dict, keyword: str):
    for whole in (
        schema,
        {"type": "array", "items": schema},
        {"properties": {"default": {"anyOf": [{"type": "null"}, schema]}}},
        {"$defs": {"x": schema}, "$ref": "#/$defs/x"},
    ):
        with pytest.raises(GrammarError, match=keyword):
            refuse_unsound(whole)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "minimum": 1.5, "exclusiveMaximum": 2},
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a", "b"]},
        {"properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
        {"const": {"minimum": 1e20}, "enum": [{"minProperties": 9}], "default": {"exclusiveMinimum": 1, "maximum": 1}},
        {"properties": {"minimum": {"type": "string"}, "required": {"type": "array"}}},
    ],
)
def test_let_through(schema: dict):
    refuse_unsound(schema)


def test_it_stands_in_the_way_of_the_compiler():
    with pytest.raises(GrammarError, match="minimum"):
        source_of(Grammar("json_schema", '{"items": {"minimum": 100000000000000000000}}'))
