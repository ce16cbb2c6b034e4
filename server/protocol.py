"""Request bodies, as OpenAI's API and vLLM's extensions define them.

Types are strict ("5" is no integer, true is no number, 1 is a number); unknown fields are ignored; fields that would
change the answer and are not implemented are refused by name (`refuse_unsupported`).
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StrictStr
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.sampling_params import MAX_STOPS

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
"""Longer lists would hold up everybody else's streams while they are read."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_COUNT = 2**53


def _check_unicode(text: str) -> str:
    # JSON can spell half of a surrogate pair, which is no text: it can be neither tokenized nor sent back.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text")
    return text


Text = Annotated[StrictStr, AfterValidator(_check_unicode)]


def _is_token_ids(value: list[Any]) -> bool:
    # `type(...) is int` and not isinstance: true and false are not token ids.
    return bool(value) and all(type(token) is int and token >= 0 for token in value)


def _parse_prompt(value: Any) -> list[str] | list[list[int]]:
    """Each form of `prompt` as a list of prompts."""
    if isinstance(value, str):
        return [_check_unicode(value)]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("prompt_count", "Input should hold at most {most} prompts", {"most": MAX_PROMPTS})
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_check_unicode(item) for item in value]
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, list) and _is_token_ids(item) for item in value):
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
    return [_check_unicode(stop) for stop in stops]


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


class _Body(BaseModel):
    # Unknown fields are kept only to be looked at by `refuse_unsupported`.
    model_config = ConfigDict(strict=True, extra="allow")

    model: Text | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


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


class GenerationBody(_Body):
    """Fields that both kinds of completion share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str], PlainValidator(_parse_stop, json_schema_input_type=str | list[str] | None)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    cache_salt: Annotated[Text, Field(max_length=1024)] | None = None
    kv_transfer_params: KVTransferBody | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    add_special_tokens: bool | None = True


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[Text, Field(min_length=1)]
    content: Annotated[Text | None, BeforeValidator(_join_parts)] = None
    name: Text | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, Any]:
        # `developer` is OpenAI's newer word for `system`, which is the one that templates know.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content, "name": self.name, "tool_call_id": self.tool_call_id}


class TemplateFields(_Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Default: true for a plain prompt; false for messages, whose template writes them out."""
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, TemplateFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


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
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "documents",
        "echo",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "prompt_embeds",
        "prompt_logprobs",
        "structured_outputs",
        "suffix",
        "tools",
        "truncate_prompt_tokens",
        "use_beam_search",
    )
} | {
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
}
_UNSUPPORTED_IN_MESSAGE: dict[str, Neutral] = {
    name: (None, [], {}) for name in ("audio", "function_call", "refusal", "tool_calls")
}


def refuse_unsupported(body: _Body) -> None:
    """Raises `RequestError` for a field that we do not implement and that would change the answer."""
    _refuse(body.model_extra, _UNSUPPORTED, "")
    if "messages" not in type(body).model_fields:
        return
    for position, message in enumerate(getattr(body, "messages", None) or ()):
        _refuse(message.model_extra, _UNSUPPORTED_IN_MESSAGE, f"messages.{position}.")


def _refuse(extra: dict[str, Any] | None, unsupported: dict[str, Neutral], path: str) -> None:
    for name in (extra or {}).keys() & unsupported.keys():
        if (extra or {})[name] not in unsupported[name]:
            raise RequestError(f"{path}{name} is not supported by this server", param=path + name)
