"""The fields of a request that shape its output: OpenAI's `response_format`, vLLM's `structured_outputs`, and its older
`guided_` fields."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.unicode_text import JsonObject, Text

MAX_CHOICES_OF_OUTPUT = 1024
Schema = JsonObject | Text
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES_OF_OUTPUT)]


class JsonSchemaFormat(BaseModel):
    """A schema with its name. `strict` changes nothing: the output always follows the schema."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None
    json_schema: Annotated[JsonObject, Field(alias="schema")]


class ResponseFormat(BaseModel):
    """OpenAI's field of this name."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field of this name; exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class StructuredFields(BaseModel):
    """The fields of a completion that shape its output. At most one of them has a say."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
