"""Splits a model's text into content and tool calls while it is generated.

  text --> [content] marker [calls, in the model's format] [content] marker ...

A call is announced once its name is one of the request's tools and its arguments have begun, and its arguments then go
out as they arrive. What breaks before that is no call: marker and all it is content. What breaks later leaves the
arguments as far as they were right, and the rest is content. Space around calls belongs to the format; nothing else is
lost. Text that may still become a marker is held back.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from server.text_source import Malformed, Reading, TextSource


@dataclass(frozen=True, slots=True)
class CallStart:
    """The first of a call: its place among the answer's calls, the id it is given, the function's name."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text."""

    index: int
    text: str


Piece = str | CallStart | CallArguments
"""A `str` is content."""


class ToolParser(ABC):
    """One per choice. The pieces joined do not depend on how the text was cut."""

    markers: ClassVar[tuple[str, ...]] = ()
    """What calls begin with, anywhere in the text."""
    other_marks: ClassVar[tuple[str, ...]] = ()
    """What else marks something within calls."""
    openers: ClassVar[str] = ""
    """Characters that may begin calls without a marker, at the very start of the text."""

    def __init__(self, tool_names: Iterable[str], *, max_calls: int | None = None) -> None:
        self.source = TextSource()
        self.tool_names = frozenset(tool_names)
        self._max_calls = max_calls
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._prefixes = tuple(marker[:end] for marker in self.markers for end in range(1, len(marker)))
        self._reading = self.read_text()

    @classmethod
    def marks(cls) -> frozenset[str]:
        """Everything that may be one token of the vocabulary and that the parser must see."""
        return frozenset((*cls.markers, *cls.other_marks))

    def feed(self, text: str) -> list[Piece]:
        """What became certain with `text`."""
        self.source.text += text
        return self._advance()

    def flush(self) -> list[Piece]:
        """What was held back; no text may follow."""
        self.source.ended = True
        return self._advance()

    @abstractmethod
    def read_calls(self, marker: str) -> Reading[None]:
        """Reads what follows `marker`, or "" where there is none, up to where content may follow.

        Raises `Malformed` with the source at the first character that is no part of a call.
        """

    @staticmethod
    @abstractmethod
    def write_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Names and arguments as the format has them: what `read_calls` reads, marker included."""

    def new_call_id(self) -> str:
        return f"call_{uuid4().hex[:24]}"

    def announce(self, name: str) -> int:
        """Begins a call; from here on there is no going back. Returns its index."""
        index = self._num_calls
        self._num_calls += 1
        self._emit(CallStart(index, self.new_call_id(), name))
        return index

    def add_arguments(self, index: int, text: str) -> None:
        if text:
            self._emit(CallArguments(index, text))

    def read_text(self) -> Reading[None]:
        """The whole answer."""
        yield from self._read_opening()
        while (marker := (yield from self._read_content())) is not None:
            yield from self._try_calls(marker)

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _emit(self, piece: Piece) -> None:
        is_surplus = not isinstance(piece, str) and self._max_calls is not None and piece.index >= self._max_calls
        if not is_surplus:
            self._pieces.append(piece)

    def _emit_content(self, text: str) -> None:
        if text:
            self._emit(text)

    def _read_opening(self) -> Reading[None]:
        """Calls at the very start. Space in front of them is no content; if none come, it is."""
        yield from self.source.skip_space()
        character = yield from self.source.peek()
        if character and character in self.openers:
            yield from self._try_calls("")
            return
        for marker in self.markers:
            if (yield from self.source.accept(marker)):
                yield from self._try_calls(marker)
                return
        self.source.position = 0

    def _try_calls(self, marker: str) -> Reading[None]:
        """Calls, or the marker as the content that it is then."""
        begin, num_before = self.source.position, self._num_calls
        try:
            yield from self.read_calls(marker)
        except Malformed:
            if self._num_calls == num_before:
                self._emit_content(self.source.text[:begin])
                self.source.position = begin
        self.source.forget()

    def _read_content(self) -> Reading[str | None]:
        """Gives out content up to the next marker, which is read and returned; None at the end of the text."""
        source = self.source
        while True:
            found = [(at, marker) for marker in self.markers if (at := source.text.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                self._emit_content(source.take(at))
                source.forget()
                source.take(len(marker))
                return marker
            held = 0 if source.ended else self._length_of_candidate(source.text)
            self._emit_content(source.take(len(source.text) - held))
            source.forget()
            if source.ended:
                return None
            yield

    def _length_of_candidate(self, text: str) -> int:
        """Length of the longest end of `text` that a marker begins with."""
        if not text.endswith(self._prefixes):
            return 0
        return max(len(prefix) for prefix in self._prefixes if text.endswith(prefix))
