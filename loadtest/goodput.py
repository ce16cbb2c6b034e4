"""Goodput: requests per second that meet every stated objective, as `vllm bench serve --goodput` counts it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.errors import SettingError
from loadtest.record import Record

_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in seconds by metric; all must hold."""

    bounds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> "Objectives":
        """`ttft:200` is 200 ms. Raises `SettingError` on anything else."""
        bounds: dict[str, float] = {}
        for pair in pairs:
            metric, _, bound = pair.partition(":")
            if metric not in _METRICS:
                raise SettingError(f"--goodput knows {', '.join(_METRICS)}, got {pair!r}")
            bounds[metric] = _milliseconds(pair, bound)
        return cls(bounds)

    def met_by(self, record: Record) -> bool:
        """A request that did not complete meets nothing; an answer of one token has no TPOT to fail."""
        if not record.completed:
            return False
        values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
        return all((values[metric] or 0.0) <= bound for metric, bound in self.bounds.items())


def _milliseconds(pair: str, bound: str) -> float:
    try:
        milliseconds = float(bound)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise SettingError(f"--goodput wants a metric and milliseconds, as ttft:200, got {pair!r}")
    return milliseconds / 1000
