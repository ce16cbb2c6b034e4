"""The shapes of what the server answers, for /openapi.json. Responses are written by hand, once per token at times; a
test holds them against these models.

A field with a default may be absent. Nullable fields without one are always there.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
TokenIds = list[int]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The field that is at fault, if one is.")
    code: int = Field(description="The HTTP status, also in a stream, whose own status was 200.")


class ErrorResponse(BaseModel):
    """Every error, whole or as an event of a stream."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token a map by token id; null for the first."""


class HeldKV(BaseModel):
    """What to send on as `kv_transfer_params` with the second leg. What is not known is left out."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int | list[int]] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    remote_blocks_expiry_time: float | None = None
    tp_size: int | None = None
    transfer_mode: str | None = None
    protocol_version: int | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None


class _Choice(BaseModel):
    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(description="The stop token or string that ended it.")
    token_ids: TokenIds | None = Field(None, description="With return_token_ids.")


class _ChunkChoice(BaseModel):
    index: int
    finish_reason: FinishReason | None = Field(description="Set in the last chunk of each choice.")
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: HeldKV | None = None


class CompletionChunkChoice(_ChunkChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice] = Field(description="Empty in the usage chunk.")
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: HeldKV | None = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class MessageDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(_ChunkChoice):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(description="Empty in the usage chunk.")
    usage: Usage | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None = Field(description="Null until a node has said what it can do.")
    permission: list[Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class NodeStatus(BaseModel):
    role: str | None
    address: str
    name: str
    ready: bool
    reason: str | None


class Readiness(BaseModel):
    ready: bool
    reason: str | None
    nodes: list[NodeStatus]


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int = Field(description="Requests for work that are under way.")
