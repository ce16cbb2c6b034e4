"""JSON schemas of answers that are nothing but tool calls, as `forced_tool_parser` reads them.

one named function    its parameters' schema: the answer is the arguments
any of the tools      a list of {"name", "parameters"}, one alternative per tool
"""

from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError
from server.tool_protocol import ToolBody

_DEFINITIONS = ("$defs", "definitions")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def schema_of_calls(tools: Sequence[ToolBody], *, is_single_call: bool, max_calls: int | None = None) -> dict[str, Any]:
    """Raises `RequestError` for a schema whose references cannot be kept when it becomes a part of a larger one."""
    if is_single_call:
        return _parameters(tools[0])
    definitions: dict[str, Any] = {}
    alternatives = [_call_schema(position, tool, definitions) for position, tool in enumerate(tools)]
    limit = {} if max_calls is None else {"maxItems": max_calls}
    schema = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": alternatives}}
    return {**schema, "$defs": definitions} if definitions else schema


def _parameters(tool: ToolBody) -> dict[str, Any]:
    # The arguments are one object, even where the schema leaves that open.
    return {"type": "object", **(tool.function.parameters or _NO_PARAMETERS)}


def _call_schema(position: int, tool: ToolBody, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of `tool`; its definitions move into `definitions`, under names of their own."""
    prefix = f"{position}."
    parameters = _moved(_parameters(tool), prefix, f"tools.{position}.function.parameters")
    for key in _DEFINITIONS:
        for name, definition in (parameters.pop(key, None) or {}).items():
            definitions[prefix + name] = definition
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, prefix: str, param: str) -> Any:
    """A copy of `schema` with its references to definitions pointing to where these move."""
    if isinstance(schema, list):
        return [_moved(item, prefix, param) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _moved(value, prefix, param) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        copy["$ref"] = _moved_reference(reference, prefix, param)
    return copy


def _moved_reference(reference: str, prefix: str, param: str) -> str:
    for key in _DEFINITIONS:
        if reference.startswith(f"#/{key}/"):
            return f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
    raise RequestError(f"{param}: $ref must point into $defs, got {reference!r}", param=param)
