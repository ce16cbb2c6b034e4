"""The shapes of what /v1/responses answers, for /openapi.json; see `response_schema`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.protocol import KVTransferBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any] | None = None


class OutputMessage(BaseModel):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCall(BaseModel):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens", "content_filter"]


class Failure(BaseModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseObject(BaseModel):
    """What the request said is repeated; `store` is always false."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: Failure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    output: list[OutputMessage | FunctionCall]
    previous_response_id: None
    background: Literal[False]
    reasoning: dict[str, None]
    store: Literal[False]
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    completed_at: int | None
    usage: ResponseUsage | None
    kv_transfer_params: KVTransferBody | None = None


class ResponseEvent(BaseModel):
    """Of a stream; what else it holds depends on its type, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int = Field(description="From 0, without gaps.")
