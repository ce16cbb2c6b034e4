"""What the report shows: distributions, gaps over time with the prompts that arrived, throughput over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.record import Record
from loadtest.runner import Round
from loadtest.summary import METRICS, Run, samples
from loadtest.svg import Axis, Plot

NUM_COLOURS = 4
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_MOST_DOTS = 4000
_NUM_BINS = 60
_LOG_FROM = 20
"""Largest over smallest from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`legend`: names of the colours c0, c1, ..."""

    title: str
    svg: str
    legend: tuple[str, ...] = ()
    note: str = ""


def latency_charts(runs: Sequence[Run]) -> list[Chart]:
    """One for each latency, with a line for each run and kind of request."""
    return [chart for metric in METRICS if (chart := _distribution(runs, metric)) is not None]


def _distribution(runs: Sequence[Run], metric: str) -> Chart | None:
    found = [(name, np.array(values) * 1000) for name, values in _series(runs, metric) if values][:NUM_COLOURS]
    if not found:
        return None
    low = min(float(values.min()) for _, values in found)
    high = max(float(values.max()) for _, values in found)
    is_log = low > 0 and high / low >= _LOG_FROM
    plot = Plot(
        title=f"{NAMES[metric]}, cumulative distribution",
        x=Axis(label="ms", low=low if is_log else 0.0, high=high or 1.0, logarithmic=is_log),
        y=Axis(label="% of " + ("gaps" if metric == "itl" else "requests"), low=0, high=100),
    )
    steps = np.linspace(0, 100, 401)
    for colour, (name, values) in enumerate(found):
        plot.line(list(zip(np.percentile(values, steps).tolist(), steps.tolist(), strict=True)), f"c{colour}", name)
    legend = tuple(name for name, _ in found)
    return Chart(title=f"{NAMES[metric]} ({metric.upper()})", svg=plot.render(), legend=legend)


def _series(runs: Sequence[Run], metric: str) -> list[tuple[str, list[float]]]:
    found = []
    for run in runs:
        records = run.records
        kinds = list(dict.fromkeys(record.kind for record in records))
        for kind in kinds:
            name = f"{run.label}, {kind}" if len(kinds) > 1 else run.label
            found.append((name, samples([record for record in records if record.kind == kind], metric)))
    return found


def gap_chart(run: Run) -> Chart | None:
    """Of the first round: each gap where it ended, and a mark where each prompt arrived, long ones all the way up."""
    one = run.rounds[0]
    gaps = [
        (after - one.started, (after - before) * 1000)
        for record in one.records
        if record.kind != "long"
        for before, after in zip(record.token_times, record.token_times[1:], strict=False)
    ]
    if not gaps:
        return None
    shown, note = _thinned(gaps)
    positive = [gap for _, gap in shown if gap > 0] or [1.0]
    low, high = max(min(positive), max(positive) / 1e4), max(positive)
    is_log = high / low >= _LOG_FROM
    plot = Plot(
        title="Gaps between tokens over time",
        x=_time_axis(one),
        y=Axis(label="ms", low=low if is_log else 0.0, high=high, logarithmic=is_log),
    )
    plot.marks(_starts(one, {"long"}), "long")
    plot.marks(_starts(one, {record.kind for record in one.records} - {"long"}), "arrival", 0.04)
    plot.dots(shown, "c0")
    legend = "Strokes from the bottom: prompts arriving" + (
        "; to the top: long ones." if _starts(one, {"long"}) else "."
    )
    return Chart(
        title=f"Gaps between tokens over time, {run.label}", svg=plot.render(), note=f"{legend} {note}".strip()
    )


def _thinned(gaps: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], str]:
    """The largest half of what may be shown, and an even choice of the others."""
    if len(gaps) <= _MOST_DOTS:
        return gaps, ""
    by_size = sorted(gaps, key=lambda gap: gap[1], reverse=True)
    half = _MOST_DOTS // 2
    rest = by_size[half:]
    kept = by_size[:half] + rest[:: len(rest) // half]
    return kept, f"{len(kept)} of {len(gaps)} gaps drawn, among them the {half} longest."


def throughput_chart(runs: Sequence[Run]) -> Chart:
    """Of the first rounds: tokens per second, and, thin, the requests under way."""
    lines = [(run.label, *_over_time(run.rounds[0])) for run in runs]
    longest = max((run.rounds[0] for run in runs), key=lambda one: one.ended - one.started)
    highest = max(float(rates.max()) for _, _, rates, _ in lines)
    plot = Plot(
        title="Output tokens per second over time",
        x=_time_axis(longest),
        y=Axis(label="tokens/s; requests", low=0, high=highest or 1.0),
    )
    for colour, (name, times, rates, under_way) in enumerate(lines):
        plot.line(list(zip(times.tolist(), rates.tolist(), strict=True)), f"c{colour}", name)
        plot.line(list(zip(times.tolist(), under_way.tolist(), strict=True)), f"c{colour} thin", f"{name}, under way")
    note = "Thin: requests under way, on the same scale."
    return Chart(
        title="Output tokens per second over time",
        svg=plot.render(),
        legend=tuple(name for name, *_ in lines),
        note=note,
    )


def _over_time(one: Round) -> tuple["np.ndarray", "np.ndarray", "np.ndarray"]:
    """Middles of the bins, tokens per second in them, requests under way at their middles."""
    edges = np.linspace(0, max(one.ended - one.started, 1e-3), _NUM_BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    times = np.array([time - one.started for record in one.records for time in record.token_times])
    rates = np.histogram(times, edges)[0] / (edges[1] - edges[0])
    begins = np.sort([record.intended - one.started for record in one.records])
    ends = np.sort([_end_of(record, one) - one.started for record in one.records])
    return middles, rates, np.searchsorted(begins, middles) - np.searchsorted(ends, middles)


def _end_of(record: Record, one: Round) -> float:
    if record.done is not None:
        return record.done
    return record.token_times[-1] if record.failed and record.token_times else one.ended


def _time_axis(one: Round) -> Axis:
    last = max((time for record in one.records for time in record.token_times[-1:]), default=one.ended)
    return Axis(label="seconds", low=0, high=max(last, one.ended) - one.started or 1.0)


def _starts(one: Round, kinds: set[str]) -> list[float]:
    return [record.intended - one.started for record in one.records if record.kind in kinds]
