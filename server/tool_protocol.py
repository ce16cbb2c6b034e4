"""The parts of request bodies that speak of tools."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from server.unicode_text import JsonObject, Text

MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024
FunctionName = Annotated[Text, Field(min_length=1, max_length=256)]


class FunctionBody(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    """JSON schema of its arguments, which are one object."""
    strict: bool | None = None


class ToolBody(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        # `strict` is about decoding: models were never shown it.
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": function}


def _parse_arguments(value: Any) -> Any:
    """The JSON text that the API has as the object that templates iterate."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json_text", "Input should be a JSON object as text") from error


ArgumentsField = Annotated[JsonObject, BeforeValidator(_parse_arguments, json_schema_input_type=str)]


class CalledFunction(BaseModel):
    """What an assistant called."""

    model_config = ConfigDict(strict=True)

    name: FunctionName
    arguments: ArgumentsField


class ToolCallBody(BaseModel):
    """A call in an assistant's earlier turn."""

    model_config = ConfigDict(strict=True)

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """The function that must be called, where one is named."""


def parse_tool_choice(value: Any) -> ToolChoice | None:
    match value:
        case None | ToolChoice():
            return value
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
    form = '{"type": "function", "function": {"name": ...}}'
    raise PydanticCustomError("tool_choice", "Input should be none, auto, required or {form}", {"form": form})


ToolList = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]
ToolCallList = Annotated[list[ToolCallBody], Field(max_length=MAX_TOOL_CALLS)]
ToolChoiceField = Annotated[
    ToolChoice | None, PlainValidator(parse_tool_choice, json_schema_input_type=str | dict[str, Any] | None)
]
