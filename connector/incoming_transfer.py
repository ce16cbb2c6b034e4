"""What has arrived of one transfer. Pure bookkeeping: units in any order, any number of times."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.peer_messages import PrefillDone


@dataclass(slots=True)
class IncomingTransfer:
    """One load, from the grant to its end.

    `arrived[layer]` holds disjoint, sorted, half-open position ranges.
    """

    transfer_id: str
    request_id: str
    start: int
    end: int
    block_ids: Sequence[int]
    num_layers: int
    granted_at: float
    arrived: list[list[tuple[int, int]]] = field(init=False)
    layer_first_unit_at: list[float | None] = field(init=False)
    layer_complete_at: list[float | None] = field(init=False)
    num_bytes: int = 0
    num_units: int = 0
    last_progress: float = 0.0
    done: PrefillDone | None = None

    def __post_init__(self) -> None:
        self.arrived = [[] for _ in range(self.num_layers)]
        self.layer_first_unit_at = [None] * self.num_layers
        self.layer_complete_at = [None] * self.num_layers
        self.last_progress = self.granted_at

    def fits(self, layer: int, start: int, end: int) -> bool:
        """Whether a unit lies within what was granted."""
        return layer < self.num_layers and self.start <= start < end <= self.end

    def add(self, layer: int, start: int, end: int, now: float) -> None:
        """The positions `[start, end)` of `layer` are in their blocks."""
        self.arrived[layer] = _merge(self.arrived[layer], (start, end))
        self.last_progress = now
        if self.layer_first_unit_at[layer] is None:
            self.layer_first_unit_at[layer] = now
        if self.layer_complete_at[layer] is None and self.arrived[layer] == [(self.start, self.end)]:
            self.layer_complete_at[layer] = now

    def is_layer_complete(self, layer: int) -> bool:
        return self.layer_complete_at[layer] is not None

    @property
    def is_complete(self) -> bool:
        """Every unit is in and the sender said that nothing follows."""
        return self.done is not None and all(at is not None for at in self.layer_complete_at)


def _merge(ranges: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*ranges, new]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
