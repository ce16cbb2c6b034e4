"""Request bodies, as OpenAI's API and vLLM's extensions define them.

Types are strict ("5" is no integer, true is no number, 1 is a number); unknown fields are ignored; fields that would
change the answer and are not implemented are refused by name (`refuse_unsupported`).
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.sampling_params import (
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOPS,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
)
from server.structured_protocol import StructuredFields
from server.tool_protocol import ToolCallList, ToolChoice, ToolChoiceField, ToolList
from server.unicode_text import JsonObject, Text, check_unicode

REQUEST_ID_PATTERN = "^[!-~]{1,128}$"
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
"""Longer lists would hold up everybody else's streams while they are read."""
MAX_FIELDS = 1024
"""Of one object, known and unknown."""
MAX_LOGIT_BIASES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_COUNT = 2**53


def _is_token_ids(value: list[Any]) -> bool:
    # The type itself: true and false are integers to Python, but not token ids.
    return set(map(type, value)) == {int} and min(value) >= 0


def _parse_prompt(value: Any) -> list[str] | list[list[int]]:
    """Each form of `prompt` as a list of prompts. Of token ids only the first of each prompt is looked at: how many are
    worth a look depends on the model (`PromptReader`).
    """
    if isinstance(value, str):
        return [check_unicode(value)]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("prompt_count", "Input should hold at most {most} prompts", {"most": MAX_PROMPTS})
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [check_unicode(item) for item in value]
        if type(value[0]) is int:
            return [value]
        if all(isinstance(item, list) and item and type(item[0]) is int for item in value):
            return value
    raise PydanticCustomError(
        "prompt_type",
        "Input should be a string, a list of strings, a list of token ids or a list of such lists, not empty",
    )


def _parse_prompt_ids(value: Any) -> list[int] | None:
    if value is None or (isinstance(value, list) and _is_token_ids(value)):
        return value
    raise PydanticCustomError("token_ids", "Input should be a list of token ids, not empty")


def _parse_block_ids(value: Any) -> list[int | list[int]] | None:
    """Flat, or one list for each group of layers."""
    if value is None:
        return None
    if isinstance(value, list):
        flat = [block for item in value for block in (item if isinstance(item, list) else [item])]
        if all(type(block) is int and 0 <= block <= MAX_COUNT for block in flat):
            return value
    raise PydanticCustomError("block_ids", "Input should be a list of block ids or a list of such lists")


def _parse_stop(value: Any) -> list[str]:
    """`stop` as a list of strings."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        rule = f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        raise PydanticCustomError("stop_size", "Input should be {rule}", {"rule": rule})
    return [check_unicode(stop) for stop in stops]


def _join_parts(value: Any) -> Any:
    """A list of text parts as one string; images and the like cannot be read by these models."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content_part", "Each part should be an object with type 'text' and a string 'text'"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _at_most(count: int) -> Callable[[Any], Any]:
    """Checks the size of an object before anything in it is looked at, which pydantic's own limit does not."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many_fields", "Input should have at most {count} fields", {"count": count})
        return value

    return check


class _OpenObject(BaseModel):
    # Unknown fields are kept only to be looked at by `refuse_unsupported`.
    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return _at_most(MAX_FIELDS)(value)


class _Body(_OpenObject):
    model: Text | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
BadWord = Annotated[Text, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Label = Annotated[Text, Field(max_length=65536)]


class KVTransferBody(BaseModel):
    """One leg of a request that a router sends in two: first to a prefill node, which holds the prompt's KV and says
    where, then with what it said to a decode node. Without a true `do_` field the others mean nothing. Unknown fields
    are ignored; no address given here is ever dialled.
    """

    model_config = ConfigDict(strict=True)

    do_remote_decode: bool | None = None
    """Hold the KV when the request is over. The response, which cannot be a stream, says where."""
    do_remote_prefill: bool | None = None
    """Fetch the prompt's KV from where the other fields say that it is held."""
    remote_engine_id: Label | None = None
    remote_request_id: Label | None = None
    remote_block_ids: Annotated[
        list[int | list[int]] | None,
        PlainValidator(_parse_block_ids, json_schema_input_type=list[int] | list[list[int]] | None),
    ] = None
    remote_host: Label | None = None
    remote_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    remote_num_tokens: Count | None = None
    remote_prefill_cached_tokens: Count | None = None
    remote_blocks_expiry_time: Annotated[float, Field(allow_inf_nan=False)] | None = None
    tp_size: Count | None = None
    transfer_mode: Label | None = None
    protocol_version: Count | None = None
    prompt_token_ids: Annotated[
        list[int] | None, PlainValidator(_parse_prompt_ids, json_schema_input_type=list[int] | None)
    ] = None
    """In a chat: the prompt as the other leg tokenized it, so that the messages need not be rendered again."""

    @property
    def is_leg(self) -> bool:
        return bool(self.do_remote_decode or self.do_remote_prefill)


class GenerationBody(_Body, StructuredFields):
    """Fields that both kinds of completion share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: int | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    """0 or -1: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_at_most(MAX_LOGIT_BIASES))] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], PlainValidator(_parse_stop, json_schema_input_type=str | list[str] | None)] = []
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    cache_salt: Annotated[Text, Field(max_length=1024)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    """The prompt's last so many tokens; -1: as many as leave room for the output."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = 0
    """Lower goes first."""
    request_id: Annotated[Text, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    kv_transfer_params: KVTransferBody | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: NumLogprobs | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = True


class ChatMessage(_OpenObject):
    """One turn of a conversation."""

    role: Annotated[Text, Field(min_length=1)]
    content: Annotated[Text | None, BeforeValidator(_join_parts)] = None
    name: Text | None = None
    tool_call_id: Text | None = None
    """On a message of role `tool`: the call that it answers."""
    tool_calls: ToolCallList | None = None
    """On an assistant's message: what it called."""

    def for_template(self) -> dict[str, Any]:
        # `developer` is OpenAI's newer word for `system`, which is the one that templates know.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content, "name": self.name, "tool_call_id": self.tool_call_id}
        if not self.tool_calls:
            return message
        calls = [call.for_template() for call in self.tool_calls]
        return message | {"content": self.content or "", "tool_calls": calls}


class TemplateFields(_Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Default: true for a plain prompt; false for messages, whose template writes them out."""
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Text | None = None
    """In place of the model's own; refused unless --trust-request-chat-template."""
    documents: Annotated[list[JsonObject], Field(max_length=MAX_MESSAGES)] | None = None
    """For templates that put documents into the prompt."""
    tools: ToolList | None = None
    tool_choice: ToolChoiceField = None
    """Default: auto with tools, none without. With none the prompt does not show the tools."""

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the prompt tells of."""
        is_none = self.tool_choice == ToolChoice("none")
        return [] if is_none else [tool.for_template() for tool in self.tools or ()]


class ChatBody(GenerationBody, TemplateFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    parallel_tool_calls: bool | None = True
    """False: at most one call."""
    echo: bool | None = False
    """Begin the answer with the final message's text, if that is the assistant's."""


class TokenizeBody(TemplateFields):
    """POST /tokenize, with a prompt or with messages."""

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(_Body):
    """POST /detokenize"""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


Neutral = Sequence[object]
_UNSUPPORTED: dict[str, Neutral] = {
    name: (None, False, "", [], {}, 0)
    for name in (
        "audio",
        "chat_template",
        "documents",
        "functions",
        "guided_whitespace_pattern",
        "logits_processors",
        "max_completion_tokens",
        "max_new_tokens",
        "prompt_embeds",
        "repetition_detection",
        "return_tokens_as_token_ids",
        "suffix",
        "top_logprobs",
        "thinking_token_budget",
        "tools",
        "use_beam_search",
        "vllm_xargs",
    )
} | {
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "reasoning_effort": (None, "none"),
    "tool_choice": (None, "none", "auto"),
    "typical_p": (None, 1),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_UNSUPPORTED_IN_MESSAGE: dict[str, Neutral] = {name: (None, [], {}) for name in ("audio", "function_call", "refusal")}


def refuse_unsupported(body: _Body) -> None:
    """Raises `RequestError` for a field that we do not implement and that would change the answer."""
    refuse_fields(body.model_extra, _UNSUPPORTED, "")
    if "messages" not in type(body).model_fields:
        return
    for position, message in enumerate(getattr(body, "messages", None) or ()):
        refuse_fields(message.model_extra, _UNSUPPORTED_IN_MESSAGE, f"messages.{position}.")


def refuse_fields(extra: dict[str, Any] | None, unsupported: dict[str, Neutral], path: str) -> None:
    """Raises `RequestError` for the first field of `extra` with a value that is not neutral."""
    for name in (extra or {}).keys() & unsupported.keys():
        if (extra or {})[name] not in unsupported[name]:
            raise RequestError(f"{path}{name} is not supported by this server", param=path + name)
