"""Fifty JSON schemas, the same in every run, and none whose documents could go on for ever."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NUM_SCHEMAS = 50
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)+$", "^#[0-9a-f]{6}$", r"^\d{4}(-\d{2})?$")


def fifty_schemas() -> list[Schema]:
    """Objects of scalars, enums, arrays, patterns, nested objects, alternatives, and references, recursion included."""
    return [_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]


def _schema(rng: random.Random) -> Schema:
    definitions: Schema = {"code": _pattern(rng), "leaf": _object(rng, 0, ())}
    definitions["node"] = _object(rng, 1, ("code", "leaf"))
    # A list of itself: at most one deep in any of its levels, so that it shrinks.
    definitions["tree"] = {
        "type": "object",
        "properties": {
            "label": {"enum": ["x", "y"]},
            "children": {"type": "array", "maxItems": 1, "items": _ref("tree")},
        },
        "required": ["label"],
        "additionalProperties": False,
    }
    return {**_object(rng, 2, ("code", "leaf", "node", "tree")), "$defs": definitions}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _object(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    properties = {f"{rng.choice('abcdefgh')}{i}": _value(rng, depth, names) for i in range(rng.randint(2, 4))}
    required = rng.sample(sorted(properties), k=rng.randint(1, len(properties)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    makers: list[Callable[[], Schema]] = [
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 10_000)},
        lambda: {"type": "number", "minimum": 0, "exclusiveMaximum": 2, "multipleOf": 0.25},
        lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 9)},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"enum": rng.sample(["red", "grün", "蓝", 7, None, True, {"k": [1]}], k=3)},
        lambda: {"const": {"version": rng.randint(1, 9)}},
        lambda: _pattern(rng),
    ]
    if depth:
        makers += [
            lambda: _object(rng, depth - 1, names),
            lambda: _array(rng, depth, names),
            lambda: {"anyOf": [_value(rng, 0, ()), _object(rng, 0, ())]},
            lambda: {"type": "array", "prefixItems": [_value(rng, 0, ()), _value(rng, 0, ())], "items": False},
        ]
    makers += [lambda: _ref(rng.choice(names))] * (3 if names else 0)
    return rng.choice(makers)()


def _array(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    fewest = rng.randint(0, 1)
    return {"type": "array", "items": _value(rng, depth - 1, names), "minItems": fewest, "maxItems": fewest + 2}


def _pattern(rng: random.Random) -> Schema:
    # A length as well: the one with a repetition has none of its own.
    return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}
