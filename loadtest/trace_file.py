"""Mooncake's traces: JSONL of timestamp (ms), input_length, output_length, and hash_ids, one per block of the prompt.

    hash_ids    [   7   |   9   |   12  ]
    prompt      |<- B ->|<- B ->|<- r ->|     B = block_tokens, r = input_length - 2 B

Two prompts that begin with the same ids begin with the same text, so that a prefix cache finds what it found in the
original. Source of the format: the FAST'25 release of the Mooncake paper.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from loadtest.conversation import Conversation, Turn
from loadtest.errors import SettingError
from loadtest.words import TokenRatio, random_text


@dataclass(frozen=True, slots=True)
class TraceRow:
    offset: float
    """Seconds from the first row."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TraceRow]:
    """The rows in the order of time. Raises `SettingError` with the line that is not one."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--file: {error}") from error
    rows = [_read_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise SettingError(f"--file {path} has no rows")
    rows.sort(key=lambda row: row.offset)
    first = rows[0].offset
    return [TraceRow(row.offset - first, row.input_length, row.output_length, row.hash_ids) for row in rows]


def _read_row(path: Path, number: int, line: str) -> TraceRow:
    try:
        row = json.loads(line)
        hash_ids = tuple(int(hash_id) for hash_id in row.get("hash_ids") or ())
        read = TraceRow(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), hash_ids)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"--file {path}, line {number}: not a row of a trace ({error!r})") from error
    if read.input_length < 1 or read.output_length < 1:
        raise SettingError(f"--file {path}, line {number}: lengths must be at least 1")
    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePrompts:
    """Texts for rows. `scale` multiplies lengths and blocks alike, so that the same part of a prompt is shared."""

    seed: str
    block_tokens: int
    scale: float
    ratio: TokenRatio

    def num_input_tokens(self, row: TraceRow) -> int:
        return max(1, round(row.input_length * self.scale))

    def conversation(self, row: TraceRow) -> Conversation:
        num_tokens = self.num_input_tokens(row)
        turn = Turn(
            text=" ".join(self._pieces(row, num_tokens)),
            num_input_tokens=num_tokens,
            num_output_tokens=max(1, round(row.output_length * self.scale)),
        )
        return Conversation(kind="trace", turns=(turn,))

    def _pieces(self, row: TraceRow, num_tokens: int) -> Iterator[str]:
        """A block's text depends on its id alone; of the last one only the beginning may be needed."""
        left = self.ratio.num_words(num_tokens)
        block = self.ratio.num_words(max(1, round(self.block_tokens * self.scale)), with_overhead=False)
        for hash_id in row.hash_ids:
            if left <= 0:
                return
            words = random_text(Random(f"{self.seed}/block/{hash_id}"), block).split(" ")
            yield " ".join(words[:left])
            left -= block
        if left > 0:
            yield random_text(Random(f"{self.seed}/tail/{row.offset}/{row.hash_ids}"), left)
