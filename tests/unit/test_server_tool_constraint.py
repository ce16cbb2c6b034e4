"""Schemas of answers that can be nothing but calls, and what a request's tools mean for its answer."""

from typing import Any

import pytest

from engine.errors import ConfigError, RequestError
from server.chat_settings import ChatConfig
from server.forced_tool_parser import NamedToolParser, RequiredToolParser
from server.hermes_tool_parser import HermesToolParser
from server.protocol import ChatBody
from server.tools import ToolUse, tool_use_of

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "$defs": {"Name": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": CITY}},
    {"type": "function", "function": {"name": "g"}},
]


def use_of(**body: Any) -> ToolUse | None:
    return tool_use_of(
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **body})
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_free_answer_has_no_schema() -> None:
    use = use_of()
    assert use is not None
    assert use.output_schema() is None
    assert isinstance(use.make_parser(HermesToolParser), HermesToolParser)
    assert use_of(tool_choice="none") is None
    assert use_of(tools=[]) is None


def test_a_named_function_has_its_parameters_schema() -> None:
    use = use_of(tool_choice=named("f"))
    assert use is not None
    assert use.output_schema() == CITY
    parser = use.make_parser(HermesToolParser)
    assert isinstance(parser, NamedToolParser)
    assert parser.tool_names == {"f"}


def test_required_is_a_list_with_an_alternative_for_each_tool() -> None:
    use = use_of(tool_choice="required", parallel_tool_calls=False)
    assert use is not None
    assert isinstance(use.make_parser(HermesToolParser), RequiredToolParser)

    def call(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        properties = {"name": {"const": name}, "parameters": parameters}
        return {
            "type": "object",
            "properties": properties,
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }

    city = {"type": "object", "properties": {"city": {"$ref": "#/$defs/0.Name"}}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.output_schema() == {
        "type": "array",
        "minItems": 1,
        "maxItems": 1,
        "items": {"anyOf": [call("f", city), call("g", nothing)]},
        "$defs": {"0.Name": {"type": "string"}},
    }
    assert CITY["$defs"], "the request's own schema was changed"


def test_a_reference_that_cannot_move_is_named() -> None:
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    use = use_of(
        tools=[{"type": "function", "function": {"name": "f", "parameters": recursive}}], tool_choice="required"
    )
    assert use is not None
    with pytest.raises(RequestError, match="must point into") as caught:
        use.output_schema()
    assert caught.value.param == "tools.0.function.parameters"


def test_the_flag_takes_known_names_only() -> None:
    assert ChatConfig(tool_call_parser="mistral").tool_call_parser == "mistral"
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, hermes"):
        ChatConfig(tool_call_parser="nope")
