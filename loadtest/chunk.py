"""One event of a streamed completion, chat or not: does it bear a token, and what else does it say?"""

from dataclasses import dataclass, field
from typing import Any

import orjson

DONE = b"[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(slots=True)
class Chunk:
    """`may_bear_token`: an empty last event: it holds a token only if the server's count has one more."""

    bears_token: bool = False
    may_bear_token: bool = False
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def read_chunk(data: bytes) -> Chunk:
    """Raises `ValueError` if `data` is not a JSON object of the shape of a chunk."""
    event = orjson.loads(data)
    if not isinstance(event, dict):
        raise ValueError("not a JSON object")
    if error := event.get("error"):
        return Chunk(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    chunk = Chunk(usage=event.get("usage"), timings=_numbers(event.get("timings")))
    for choice in event.get("choices") or ():
        _add_choice(chunk, choice)
    return chunk


def _add_choice(chunk: Chunk, choice: dict[str, Any]) -> None:
    delta = choice.get("delta")
    if delta is None:
        text, says_more, opens = choice.get("text") or "", False, False
    else:
        text = next((delta[name] for name in _TEXTS if delta.get(name)), "")
        says_more, opens = bool(delta.get("tool_calls")), "role" in delta
    chunk.text += text
    reason = choice.get("finish_reason")
    chunk.finish_reason = reason or chunk.finish_reason
    if text or says_more or (reason is None and not opens):
        chunk.bears_token = True
    elif reason is not None:
        chunk.may_bear_token = True


def _numbers(timings: object) -> dict[str, float]:
    if not isinstance(timings, dict):
        return {}
    kept = {str(name): value for name, value in timings.items() if not isinstance(value, bool)}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float)}
