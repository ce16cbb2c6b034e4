"""JSON schemas that llguidance (1.9) compiles and then follows wrongly: refused, so that what is valid is valid.

integers beyond int64                     clamped
an exclusive whole bound of a number,     the bound itself is let through where the other one is less than 1 away
on the side of 0
minProperties of names left open          the same name twice counts as two
"""

from collections.abc import Iterator
from typing import Any

from engine.grammar import GrammarError

MAX_BOUND = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
"""Not schemas, whatever they look like."""

Schema = dict[str, Any]


def refuse_unsound(schema: Schema) -> None:
    """Raises `GrammarError` naming the keyword."""
    for part in _parts(schema):
        bounds = {name: part[name] for name in _BOUNDS if isinstance(part.get(name), int | float)}
        for name, value in bounds.items():
            if abs(value) > MAX_BOUND:
                raise GrammarError(f"{name}: numbers beyond 2**53 are not supported")
        if bounds.get("exclusiveMinimum", -1) >= 0:
            _check_open_bound(part, bounds, "exclusiveMinimum", ("maximum", "exclusiveMaximum"))
        if bounds.get("exclusiveMaximum", 1) <= 0:
            _check_open_bound(part, bounds, "exclusiveMaximum", ("minimum", "exclusiveMinimum"))
        _check_min_properties(part)


def _check_open_bound(part: Schema, bounds: dict[str, float], open_end: str, others: tuple[str, str]) -> None:
    if bounds[open_end] != int(bounds[open_end]) or part.get("type") == "integer":
        return
    for other in others:
        if other in bounds and abs(bounds[other] - bounds[open_end]) < 1:
            raise GrammarError(f"{open_end} {bounds[open_end]} with {other} less than 1 away is not supported")


def _check_min_properties(part: Schema) -> None:
    least = part.get("minProperties")
    required = part.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = part.get("additionalProperties") is not False or "patternProperties" in part
    if isinstance(least, int) and least > max(1, num_required) and is_open:
        raise GrammarError("minProperties beyond those required is not supported where other names may come")


def _parts(schema: Any) -> Iterator[Schema]:
    """The schema and every schema in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif name not in _VALUES:
                    waiting.append(value)
