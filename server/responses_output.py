"""The output items of one response as they grow, and the events that tell a stream's client of each step.

message         output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
                output_item.done
function_call   output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from server.tool_parser import CallArguments, CallStart, Piece

Event = dict[str, Any]
Item = dict[str, Any]


class ResponseOutput:
    """One item at a time is open, the last. Every method must be read to its end: it works while it is read."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    def add(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case str():
                yield from self._add_text(piece)
            case CallStart():
                yield from self.end_item()
                call = {"call_id": piece.call_id, "name": piece.name, "arguments": ""}
                yield self._begin({"id": _new_id("fc"), "type": "function_call", "status": "in_progress", **call})
            case CallArguments():
                self.items[-1]["arguments"] += piece.text
                yield self._of_item("response.function_call_arguments.delta", delta=piece.text)

    def end(self, status: str) -> Iterator[Event]:
        """The end of the output. An answer of nothing is an empty message."""
        if not self.items:
            yield from self._begin_message()
        yield from self.end_item(status)

    def end_item(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_part("response.output_text.done", text=part["text"], logprobs=[])
            yield self._of_part("response.content_part.done", part=dict(part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)}

    def shown(self) -> list[Item]:
        return [_copy(item) for item in self.items]

    def _add_text(self, text: str) -> Iterator[Event]:
        if not (self._is_open and self.items[-1]["type"] == "message"):
            yield from self.end_item()
            yield from self._begin_message()
        self.items[-1]["content"][0]["text"] += text
        yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _begin_message(self) -> Iterator[Event]:
        item: Item = {"id": _new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        yield self._begin({**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._of_part("response.content_part.added", part=dict(part))

    def _begin(self, item: Item) -> Event:
        self.items.append(item)
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return {**self._of_item(kind), "content_index": 0, **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _copy(item: Item) -> Item:
    # Events are encoded after the item may have grown.
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
