"""What has arrived of one transfer. Pure bookkeeping: units in any order, any number of times."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.peer_messages import FirstToken, PrefillDone
from engine.prompt_logprobs import PromptLogprobs, follows


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
    num_cached_tokens: int = 0
    """What of it the sender had found in its cache, where that is known beforehand."""
    arrived: list[list[tuple[int, int]]] = field(init=False)
    layer_first_unit_at: list[float | None] = field(init=False)
    layer_complete_at: list[float | None] = field(init=False)
    num_bytes: int = 0
    num_units: int = 0
    num_hidden_bytes: int | None = None
    """Bytes that had arrived when the prefill's last layer was computed: their way cost nobody time. Known with the end
    of the transfer, and meaningful where both ends share one clock, on one host."""
    last_progress: float = 0.0
    first_token: FirstToken | None = None
    first_token_at: float | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    done: PrefillDone | None = None
    _arrivals: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = [[] for _ in range(self.num_layers)]
        self.layer_first_unit_at = [None] * self.num_layers
        self.layer_complete_at = [None] * self.num_layers
        self.last_progress = self.granted_at

    def fits(self, layer: int, start: int, end: int) -> bool:
        """Whether a unit lies within what was granted."""
        return layer < self.num_layers and self.start <= start < end <= self.end

    def count(self, num_bytes: int, now: float) -> None:
        """A unit of that size has arrived."""
        self.num_units += 1
        self.num_bytes += num_bytes
        self._arrivals.append((now, num_bytes))

    def take_end(self, done: PrefillDone, now: float) -> None:
        """The sender's last word."""
        self.done = done
        self.last_progress = now
        self.num_hidden_bytes = sum(num_bytes for at, num_bytes in self._arrivals if at <= done.computed_at)
        self._arrivals.clear()

    def take_prompt_logprobs(self, piece: PromptLogprobs, now: float) -> bool:
        """False, and nothing changes, if it does not go on where the pieces before it ended."""
        if not follows(piece, self.prompt_logprobs) or piece.end > self.end:
            return False
        self.prompt_logprobs.append(piece)
        self.last_progress = now
        return True

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
    def num_valid_tokens(self) -> int:
        """Leading positions that are in on every layer, those before `start` included."""
        return min(self._leading_end(ranges) for ranges in self.arrived)

    def expected_stall(self, now: float, layer_seconds: float) -> float | None:
        """How long a forward that began now would wait at this transfer's barriers, in seconds. None: not known yet.

        Layers are complete in order, one every `interval` seconds as measured so far; the forward reaches layer l after
        `l * layer_seconds`. It waits longest at the last layer or, where layers arrive faster than it runs, at the
        first that is missing.
        """
        times = [at for at in self.layer_complete_at if at is not None]
        num_complete = len(times)
        if num_complete == self.num_layers:
            return 0.0
        if num_complete < 2 or self.layer_complete_at[num_complete - 1] is None:
            return None
        interval = (times[-1] - times[0]) / (num_complete - 1)
        at_next = times[-1] + interval - now - num_complete * layer_seconds
        at_last = times[-1] + (self.num_layers - num_complete) * interval - now - (self.num_layers - 1) * layer_seconds
        return max(at_next, at_last, 0.0)

    def _leading_end(self, ranges: list[tuple[int, int]]) -> int:
        return ranges[0][1] if ranges and ranges[0][0] == self.start else self.start

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
