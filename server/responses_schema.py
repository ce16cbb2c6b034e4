"""The shapes of what /v1/responses answers, for /openapi.json."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.protocol import KVTransferBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


OutputItem = Annotated[OutputMessage | OutputFunctionCall, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class TextFormat(BaseModel):
    format: dict[str, Any]


class ResponseObject(BaseModel):
    """What was said, and with which settings."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    reasoning: dict[str, None]
    store: Literal[False]
    temperature: float
    top_p: float
    text: TextFormat
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    kv_transfer_params: KVTransferBody | None = None


class ResponseEvent(BaseModel):
    """One event of a stream. What else it holds depends on its type."""

    type: Annotated[str, Field(pattern=r"^response\.")]
    sequence_number: int
    response: ResponseObject | None = Field(None, description="In the first events and the last.")
    output_index: int | None = None
    item: OutputItem | None = None
    delta: str | None = None
