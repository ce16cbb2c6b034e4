"""Two runs compared: ratios, second to first, with 95 % intervals by bootstrap.

Rounds differ more than the requests in one, and the gaps of one answer are alike. So a resample draws rounds, the same
for both runs as these took turns, and then requests of each round with all their gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.runner import Round
from loadtest.summary import METRICS, Run, samples, throughput

RESAMPLES = 1000
_MOST_DRAWN = 100_000_000
"""Samples drawn in all for one metric: long runs are resampled less often, at least 100 times."""

_LEAST = 1e-9

Array = NDArray[np.float64]
_STATISTICS = ("mean", "p50", "p99")


def _statistics(values: Array) -> Array:
    """Those of `_STATISTICS`. Sorts in place: numpy's own percentile costs ten times as much on so few."""
    values.sort()
    return np.array([values.mean(), _quantile(values, 0.5), _quantile(values, 0.99)])


def _quantile(in_order: Array, part: float) -> float:
    position = (in_order.size - 1) * part
    below = int(position)
    low, high = float(in_order[below]), float(in_order[min(below + 1, in_order.size - 1)])
    return low + (high - low) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`first` and `second` in ms, or per second; the interval is of `ratio`, None where one round cannot give one."""

    name: str
    first: float
    second: float
    low: float | None
    high: float | None

    @property
    def ratio(self) -> float:
        return self.second / self.first

    @property
    def is_a_difference(self) -> bool:
        """The interval leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "second": self.second,
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "differs": self.is_a_difference,
        }


def compare(first: Run, second: Run, seed: int = 0) -> list[Ratio]:
    """Throughputs, then mean, p50 and p99 of each latency by kind of request, where both runs have any."""
    rng = np.random.default_rng(seed)
    kinds = [
        kind for kind in dict.fromkeys(r.kind for r in first.records) if any(r.kind == kind for r in second.records)
    ]
    ratios = _throughput_ratios(first, second, rng)
    for kind in kinds:
        prefix = f"{kind} " if len(kinds) > 1 else ""
        for metric in METRICS:
            ratios += _latency_ratios(
                prefix + metric, _by_round(first, kind, metric), _by_round(second, kind, metric), rng
            )
    return ratios


def _throughput_ratios(first: Run, second: Run, rng: np.random.Generator) -> list[Ratio]:
    names = ("request_throughput", "output_throughput")
    rates = [[throughput(one) for one in run.rounds] for run in (first, second)]
    found = []
    for name in names:
        one, two = (np.array([rate[name] for rate in of_run]) for of_run in rates)
        if not one.mean() or not two.mean():
            continue
        draws = np.array(
            [
                two[picks2].mean() / max(float(one[picks1].mean()), _LEAST)
                for picks1, picks2 in (_draw_rounds(len(one), len(two), rng) for _ in range(RESAMPLES))
            ]
        )
        enough = min(len(one), len(two)) > 1
        low, high = _interval(draws) if enough else (None, None)
        found.append(Ratio(name=name, first=float(one.mean()), second=float(two.mean()), low=low, high=high))
    return found


def _by_round(run: Run, kind: str, metric: str) -> list[list[Array]]:
    """Samples in ms, by round and request."""
    return [_by_request(one, kind, metric) for one in run.rounds]


def _by_request(one: Round, kind: str, metric: str) -> list[Array]:
    found = (np.array(samples([record], metric)) * 1000 for record in one.records if record.kind == kind)
    return [values for values in found if values.size]


def _latency_ratios(
    name: str, first: list[list[Array]], second: list[list[Array]], rng: np.random.Generator
) -> list[Ratio]:
    first, second = [one for one in first if one], [one for one in second if one]
    if not first or not second:
        return []
    all_first, all_second = _flat(first), _flat(second)
    num_draws = max(100, min(RESAMPLES, _MOST_DRAWN // (all_first.size + all_second.size)))
    draws = np.empty((num_draws, len(_STATISTICS)))
    for number in range(num_draws):
        picks1, picks2 = _draw_rounds(len(first), len(second), rng)
        one = _statistics(_draw_requests(first, picks1, rng))
        two = _statistics(_draw_requests(second, picks2, rng))
        draws[number] = two / np.maximum(one, _LEAST)
    figures1, figures2 = _statistics(all_first).tolist(), _statistics(all_second).tolist()
    found = []
    for column, statistic in enumerate(_STATISTICS):
        low, high = _interval(draws[:, column])
        ratio = Ratio(name=f"{name} {statistic}", first=figures1[column], second=figures2[column], low=low, high=high)
        if ratio.first > 0:
            found.append(ratio)
    return found


def _draw_rounds(num_first: int, num_second: int, rng: np.random.Generator) -> tuple[Sequence[int], Sequence[int]]:
    """The same for both if they have as many: such rounds took turns."""
    picks = rng.integers(num_first, size=num_first).tolist()
    return picks, picks if num_first == num_second else rng.integers(num_second, size=num_second).tolist()


def _draw_requests(rounds: list[list[Array]], picks: Sequence[int], rng: np.random.Generator) -> Array:
    drawn = [
        rounds[pick][number] for pick in picks for number in rng.integers(len(rounds[pick]), size=len(rounds[pick]))
    ]
    return np.concatenate(drawn)


def _flat(rounds: list[list[Array]]) -> Array:
    return np.concatenate([values for one in rounds for values in one])


def _interval(draws: Array) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
