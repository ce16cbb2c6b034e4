"""What one user asks: a conversation of one or more turns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question. `num_input_tokens` is the whole prompt's length, where the workload knows it."""

    text: str
    num_output_tokens: int
    num_input_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns follow each other: each waits for the answer before, and carries all that was said."""

    kind: str
    turns: tuple[Turn, ...]
    system: str = ""
    think_time: float = 0.0
    """Seconds from an answer to the next question."""
