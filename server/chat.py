"""POST /v1/chat/completions"""

from typing import Any

from fastapi import APIRouter, Request, Response

from server.answer import Answer
from server.chat_start import StartedChat, start_chat
from server.choice import Delta
from server.kv_transfer import leg_of
from server.logprobs import chat_logprobs
from server.openapi import answers
from server.protocol import ChatBody
from server.respond import respond
from server.response_schema import ChatCompletion, ChatCompletionChunk
from server.service import Service
from server.tool_parser import CallArguments, CallStart, Piece

EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 32}


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **answers(ChatCompletion, events=ChatCompletionChunk, example=EXAMPLE))
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        with service.released_on_failure(leg_of(body)):
            answer = ChatAnswer(await start_chat(body, request, service))
        return await respond(request, answer, stream=bool(body.stream))

    return router


class ChatAnswer(Answer):
    """Chat completions: a stream opens with the role of each choice, and tool calls go out piece by piece."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, started: StartedChat) -> None:
        super().__init__(started.options, started.generation)
        self._prompt = started.prompt
        self._echo = _echo(started.body)

    def opening_choices(self) -> list[dict[str, Any]]:
        deltas = [{"role": "assistant", "content": ""}, *([{"content": self._echo}] if self._echo else ())]
        return [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
            for choice in self.generation.choices
        ]

    def prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.options.return_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        if (logprobs := self._prompt_logprobs(0, self._prompt)) is not None:
            fields["prompt_logprobs"] = logprobs
        return fields

    def finish_reason(self, delta: Delta) -> str | None:
        is_call = delta.finish_reason == "stop" and self.generation.choices[delta.index].has_whole_calls
        return "tool_calls" if is_call else delta.finish_reason

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs_of(delta)}

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + whole.text, "refusal": None}
        if calls := _whole_calls(whole.pieces):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"index": whole.index, "message": message, "logprobs": self._logprobs_of(whole)}

    def delta_events(self, delta: Delta) -> bytes:
        """A delta with calls makes a chunk for each piece, then one for its tokens and its end."""
        if all(isinstance(piece, str) for piece in delta.pieces):
            return super().delta_events(delta)
        chunks = b"".join(self._event([self._piece_choice(delta.index, piece)]) for piece in delta.pieces)
        rest = Delta(delta.index, tokens=delta.tokens, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        is_told = self.options.num_top_logprobs is not None or self.options.return_token_ids
        return chunks + super().delta_events(rest) if is_told or rest.finish_reason is not None else chunks

    def _piece_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece} if isinstance(piece, str) else {"tool_calls": [_call_delta(piece)]}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        num_top = self.options.num_top_logprobs
        return None if num_top is None else chat_logprobs(delta.tokens, self.options.tokenizer, num_top)


def _echo(body: ChatBody) -> str:
    """The text that the answer begins with, because it goes on from there."""
    last = body.messages[-1]
    return (last.content or "") if body.echo and last.role == "assistant" else ""


def _call_delta(piece: CallStart | CallArguments) -> dict[str, Any]:
    if isinstance(piece, CallArguments):
        return {"index": piece.index, "function": {"arguments": piece.text}}
    function = {"name": piece.name, "arguments": ""}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


def _whole_calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    return calls
