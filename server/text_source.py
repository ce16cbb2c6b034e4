"""Text that arrives in pieces, read by generators that yield where they need more of it.

A reader may decide by nothing but the text itself, never by where a piece ended: then the result is the same however
the text was cut.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields for more text; returns what it read."""

SPACE = " \t\n\r"
_SPACE_RUN = re.compile(f"[{SPACE}]+")


class Malformed(Exception):
    """The text at the source's position is not what the reader is for."""


class EndedEarly(Malformed):
    """The text ended within what the reader is for."""


class TextSource:
    """All text from `position` on is still to be read; `ended` says that no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False

    @property
    def rest(self) -> str:
        return self.text[self.position :]

    def take(self, length: int) -> str:
        """The next `length` characters, which must be there."""
        start, self.position = self.position, self.position + length
        return self.text[start : self.position]

    def forget(self) -> None:
        """Drops what has been read: there is no going back to before this point."""
        self.text, self.position = self.rest, 0

    def peek(self) -> Reading[str]:
        """The next character; "" at the end of the text."""
        while self.position >= len(self.text) and not self.ended:
            yield
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self.take_match(_SPACE_RUN)

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """What `pattern` matches here of the text that is there; "" if nothing."""
        match = pattern.match(self.text, self.position)
        return self.take(match.end() - self.position) if match else ""

    def take_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Everything up to the first character that `pattern`, a repeated character class, does not match."""
        length = 0
        while True:
            match = pattern.match(self.text, self.position + length)
            length += match.end() - match.start() if match else 0
            if self.position + length < len(self.text) or self.ended:
                return self.take(length)
            yield

    def accept(self, word: str, *, closes: bool = False) -> Reading[bool]:
        """Reads `word` if it comes next. With `closes`, a part of it at the very end of the text will do."""
        while (arrived := self.text[self.position : self.position + len(word)]) != word:
            if not word.startswith(arrived) or self.ended:
                break
            yield
        if arrived == word or (closes and arrived and word.startswith(arrived)):
            self.take(len(arrived))
            return True
        return False

    def expect(self, word: str) -> Reading[None]:
        if not (yield from self.accept(word)):
            raise (EndedEarly if self.ended and word.startswith(self.rest) else Malformed)
