"""The body of POST /v1/responses: the text subset of OpenAI's API, over the sampling fields that all endpoints share.

Nothing is kept between requests: what refers to an earlier response is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from server.protocol import MAX_MESSAGES, ChatBody, CompletionBody, GenerationBody, Neutral, refuse_fields
from server.tool_protocol import MAX_TOOLS, ArgumentsField, FunctionName, ToolChoice, parse_tool_choice
from server.unicode_text import JsonObject, Text

_TEXT_PARTS = ("input_text", "output_text", "text")


def _join_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content_part", "Each part should be an object with type 'input_text' and a string 'text'"
            )
    return "\n".join(part["text"] for part in value)


TextContent = Annotated[Text, BeforeValidator(_join_parts, json_schema_input_type=str | list[dict[str, Any]])]


class MessageItem(BaseModel):
    """A turn of the conversation, in either of the SDKs' forms."""

    model_config = ConfigDict(strict=True)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent


class FunctionCallItem(BaseModel):
    """What the model called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: ArgumentsField


class FunctionCallOutputItem(BaseModel):
    """What came of a call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call_output"]
    call_id: Text
    output: TextContent


def _item_type(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
    Discriminator(_item_type),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FlatToolBody(BaseModel):
    """A function, as this endpoint has it: without the object around it."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


def _parse_tool_choice(value: Any) -> ToolChoice | None:
    match value:
        case {"type": "function", "name": str(name)}:
            return ToolChoice("named", name)
        case str() | None:
            return parse_tool_choice(value)
    form = '{"type": "function", "name": ...}'
    raise PydanticCustomError("tool_choice", "Input should be none, auto, required or {form}", {"form": form})


class TextOptions(BaseModel):
    """How the text is to look."""

    model_config = ConfigDict(strict=True)

    format: JsonObject | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses"""

    input: Annotated[
        list[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES - 1),
    ]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FlatToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        ToolChoice | None, PlainValidator(_parse_tool_choice, json_schema_input_type=str | dict[str, Any] | None)
    ] = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    metadata: dict[Text, Text] | None = None
    store: bool | None = None
    """Nothing is ever stored, and the response says so."""
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


_REFUSED: dict[str, Neutral] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "include": (None, [], ["reasoning.encrypted_content"]),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "truncation": (None, "disabled"),
}
_NOT_SHOWN: dict[str, Neutral] = {"n": (None, 1), "prompt_logprobs": (None,), "return_token_ids": (None, False)}
"""What all endpoints share, but a response has no place for."""
_OTHER_ENDPOINTS: dict[str, Neutral] = {
    name: (None, False, "", [], {}, 0)
    for name in (ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()) - ResponsesBody.model_fields.keys()
    if name not in ("add_generation_prompt", "add_special_tokens")
}


def refuse_foreign(body: ResponsesBody) -> None:
    """Raises `RequestError` for what this endpoint does not do and what would change the answer."""
    refuse_fields(body.model_extra, _OTHER_ENDPOINTS | _REFUSED, "")
    for name, neutral in _NOT_SHOWN.items():
        if getattr(body, name) not in neutral:
            raise RequestError(f"{name} is not supported by /v1/responses", param=name)
