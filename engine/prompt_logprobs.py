"""Logprobs of prompt tokens, compact enough for long prompts: 8 bytes a number pair, whatever language packs them.

A piece covers consecutive positions. Pieces travel as they were made, from the worker to the server; nothing on the way
looks into them. Torch-free.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling_params import MAX_LOGPROBS

MAX_PIECE_POSITIONS = 1024
"""With twenty alternatives each, 170 kB: no message is large, however long the prompt."""


class PromptLogprob(NamedTuple):
    """One prompt token, given all before it. `top_logprobs` holds (token id, logprob), likeliest first."""

    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top_logprobs: tuple[tuple[int, float], ...]


class WantedLogprobs(NamedTuple):
    """What a step is to compute beside its tokens: how likely the token after each of them was."""

    num_top: int
    next_token_ids: Sequence[int]
    """The prompt tokens that follow the step's; one fewer than the step's where the prompt ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of the prompt tokens at positions `[start, end)`; position 0 has none. Little-endian float32 and int32.

    Raises `ValueError` if the parts are not of one piece.
    """

    start: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    """`[end - start, num_top]`"""
    top_logprobs: bytes

    def __post_init__(self) -> None:
        count = len(self.ranks) // 4
        sizes = (len(self.logprobs), len(self.ranks), len(self.top_token_ids), len(self.top_logprobs))
        expected = (4 * count, 4 * count, 4 * count * self.num_top, 4 * count * self.num_top)
        if self.start < 1 or not 1 <= count <= MAX_PIECE_POSITIONS or not 0 <= self.num_top <= MAX_LOGPROBS:
            raise ValueError(f"prompt logprobs of {count} positions from {self.start}, {self.num_top} alternatives")
        if sizes != expected:
            raise ValueError(f"prompt logprobs of {sizes} bytes, expected {expected}")

    @property
    def end(self) -> int:
        return self.start + len(self.ranks) // 4

    def __iter__(self) -> Iterator[PromptLogprob]:
        count, width = len(self.ranks) // 4, self.num_top
        logprobs = struct.unpack(f"<{count}f", self.logprobs)
        ranks = struct.unpack(f"<{count}i", self.ranks)
        top_ids = struct.unpack(f"<{count * width}i", self.top_token_ids)
        top_values = struct.unpack(f"<{count * width}f", self.top_logprobs)
        for row in range(count):
            own = slice(row * width, (row + 1) * width)
            yield PromptLogprob(logprobs[row], ranks[row], tuple(zip(top_ids[own], top_values[own], strict=True)))


def covered_end(pieces: Sequence[PromptLogprobs]) -> int:
    """The first position that consecutive `pieces` leave open."""
    return pieces[-1].end if pieces else 1


def follows(piece: PromptLogprobs, pieces: Sequence[PromptLogprobs]) -> bool:
    """Whether `piece` goes on where `pieces` end."""
    return piece.start == covered_end(pieces)
