"""Finds stop strings in text that arrives in pieces, and holds back what might still become one."""

from collections.abc import Sequence


class StopStrings:
    """Text goes in piece by piece; what is certainly not part of a stop string comes out.

    The match that is complete first ends the text (of two that end together, the longer), so the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._prefixes = tuple({stop[:length] for stop in stops for length in range(1, len(stop))})
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str, *, may_end: bool = True) -> str:
        """The text that is free to go. Once `matched` is set everything further is swallowed.

        A stop string whose last character is in a piece that may not end the text is text like any other.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        if may_end and (match := self._first_match(text)) is not None:
            return self._end_at(text, *match)
        kept = self._length_of_candidate(text)
        free = len(text) - kept
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first."""
        # One that ends within what was held back would have ended the text before, had it been allowed to.
        num_held = len(self._held)
        found = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_held + 1 - len(stop)))) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _end_at(self, text: str, end: int, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text[: end if self._include else end - len(stop)]

    def _length_of_candidate(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        # One call in C settles the usual case, that nothing at the end looks like the start of a stop string.
        if not text.endswith(self._prefixes):
            return 0
        return max(len(prefix) for prefix in self._prefixes if text.endswith(prefix))
