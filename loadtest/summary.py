"""A run in figures. JSON names are those of `vllm bench serve`; milliseconds where the name says so."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.goodput import Objectives
from loadtest.own_load import OwnLoad
from loadtest.percentiles import Distribution
from loadtest.record import Record
from loadtest.runner import Round

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Beyond these the client was the bottleneck."""

    max_cpu_share: float
    max_lag: float
    """Seconds."""


@dataclass(slots=True, kw_only=True)
class Run:
    """All rounds of one server."""

    label: str
    settings: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    loads: list[OwnLoad] = field(default_factory=list)
    num_left_out: int = 0

    @property
    def records(self) -> list[Record]:
        return [record for one in self.rounds for record in one.records]


def samples(records: Iterable[Record], metric: str) -> list[float]:
    """Of requests that completed; first tokens and gaps also of those that we cut off."""
    match metric:
        case "itl":
            return [gap for record in records if not record.failed for gap in record.itl]
        case "ttft":
            return [record.ttft for record in records if not record.failed and record.ttft is not None]
        case "tpot":
            return [record.tpot for record in records if record.completed and record.tpot is not None]
        case "e2el":
            return [record.e2el for record in records if record.completed and record.e2el is not None]
    raise ValueError(metric)


def summarize(run: Run, objectives: Objectives, bounds: Bounds) -> dict[str, Any]:
    """The whole summary."""
    records = run.records
    reasons = why_not_clean(run, bounds)
    summary: dict[str, Any] = {
        "label": run.label,
        "clean": not reasons,
        "not_clean": reasons,
        "interrupted": any(one.interrupted for one in run.rounds),
        **_counts(run, objectives),
        **_latencies(records),
        "errors": _errors(records),
        "usage": _usage(records),
        "client": _client(run),
    }
    kinds = sorted({record.kind for record in records})
    if len(kinds) > 1:
        summary["kinds"] = {kind: _of_kind([record for record in records if record.kind == kind]) for kind in kinds}
    if "long" in kinds and "decode" in kinds:
        summary["interference"] = _interference(run.rounds)
    if phases := _phases(records):
        summary["phases_ms"] = phases
    return summary


def throughput(one: Round) -> dict[str, float]:
    """Of one round, within its window."""
    seconds = max(one.ended - one.started, 1e-9)
    completed = [record for record in one.records if record.completed and (record.done or 0.0) <= one.ended]
    num_output = sum(_tokens_in_window(record, one.ended) for record in one.records)
    num_input = sum(record.prompt_tokens or 0 for record in completed)
    return {
        "request_throughput": len(completed) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_output + num_input) / seconds,
    }


def _tokens_in_window(record: Record, ended: float) -> float:
    """The server's count, shared evenly by the events that bear tokens."""
    if not record.token_times:
        return 0.0
    inside = sum(time <= ended for time in record.token_times)
    return record.num_output_tokens * inside / len(record.token_times)


def _counts(run: Run, objectives: Objectives) -> dict[str, Any]:
    records = run.records
    seconds = sum(one.ended - one.started for one in run.rounds)
    rates = [throughput(one) for one in run.rounds]
    shares = [(one.ended - one.started) / seconds if seconds else 0.0 for one in run.rounds]
    counts: dict[str, Any] = {
        "duration": seconds,
        "rounds": len(run.rounds),
        "completed": sum(record.completed for record in records),
        "failed": sum(record.failed for record in records),
        "unfinished": sum(not record.completed and not record.failed for record in records),
        "left_out": run.num_left_out,
        "total_input_tokens": sum(record.prompt_tokens or 0 for record in records),
        "total_output_tokens": sum(record.num_output_tokens for record in records),
    }
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        counts[name] = sum(rate[name] * share for rate, share in zip(rates, shares, strict=True))
    if objectives.bounds:
        inside = [(record, one.ended) for one in run.rounds for record in one.records]
        good = sum(objectives.met_by(record) and (record.done or 0.0) <= ended for record, ended in inside)
        counts["request_goodput"] = good / seconds if seconds else 0.0
        counts["goodput_share"] = sum(map(objectives.met_by, records)) / len(records) if records else 0.0
        counts["objectives_ms"] = {metric: bound * 1000 for metric, bound in objectives.bounds.items()}
    return counts


def _latencies(records: Sequence[Record]) -> dict[str, float]:
    named: dict[str, float] = {}
    for metric in METRICS:
        figures = Distribution.of(samples(records, metric))
        if figures is not None:
            named |= {
                f"mean_{metric}_ms": figures.mean * 1000,
                f"std_{metric}_ms": figures.std * 1000,
                f"median_{metric}_ms": figures.p50 * 1000,
                f"p90_{metric}_ms": figures.p90 * 1000,
                f"p99_{metric}_ms": figures.p99 * 1000,
                f"max_{metric}_ms": figures.max * 1000,
            }
    return named


def _of_kind(records: Sequence[Record]) -> dict[str, Any]:
    completed = sum(record.completed for record in records)
    return {"completed": completed, "failed": sum(record.failed for record in records), **_latencies(records)}


def _errors(records: Sequence[Record]) -> list[dict[str, Any]]:
    """By kind, the most frequent first, with the first message of each."""
    counts = Counter(record.error_kind for record in records if record.failed)
    return [
        {"kind": kind, "count": count, "first": next(r.error for r in records if r.error_kind == kind)}
        for kind, count in counts.most_common()
    ]


def _usage(records: Sequence[Record]) -> dict[str, Any]:
    """What the server says it read and wrote, beside what was asked for and what came."""
    counted = [r for r in records if r.completed and r.completion_tokens is not None and r.prompt_tokens is not None]
    sized = [record for record in counted if record.asked_input_tokens is not None]
    return {
        "requests_with_usage": len(counted),
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in (sized or counted)),
        "asked_prompt_tokens": sum(record.asked_input_tokens or 0 for record in sized),
        "cached_tokens": sum(record.cached_tokens or 0 for record in counted),
        "completion_tokens": sum(record.completion_tokens or 0 for record in counted),
        "asked_completion_tokens": sum(record.asked_output_tokens for record in counted),
        "token_events": sum(len(record.token_times) for record in counted),
    }


def _client(run: Run) -> dict[str, Any]:
    lags = Distribution.of([record.lag for record in run.records if record.lag is not None])
    loop_lags = Distribution.of([lag for load in run.loads for lag in load.loop_lags])
    cpu, wall = sum(load.cpu_seconds for load in run.loads), sum(load.wall_seconds for load in run.loads)
    return {
        "cpu_seconds": cpu,
        "cpu_share": cpu / wall if wall else 0.0,
        "schedule_lag_ms": _in_ms(lags),
        "loop_lag_ms": _in_ms(loop_lags),
    }


def why_not_clean(run: Run, bounds: Bounds) -> list[str]:
    """Sentences; none if the figures are the server's alone."""
    client = _client(run)
    reasons = []
    if client["cpu_share"] > bounds.max_cpu_share:
        reasons.append(f"the client used {client['cpu_share']:.0%} of a core, over {bounds.max_cpu_share:.0%}")
    for name, what in (("schedule_lag_ms", "requests left"), ("loop_lag_ms", "the client's event loop woke")):
        figures, bound = client[name], bounds.max_lag * 1000
        if figures and figures["p99"] > bound:
            reasons.append(f"{what} {figures['p99']:.1f} ms late (p99), over {bound:g} ms")
    return reasons


def _in_ms(figures: Distribution | None) -> dict[str, float] | None:
    if figures is None:
        return None
    return {name: getattr(figures, name) * 1000 for name in ("p50", "p90", "p99", "max")}


def _interference(rounds: Sequence[Round]) -> dict[str, Any]:
    """Gaps of the steady decodes: those that a long prompt's wait for its first token overlaps, and the others."""
    parts = [split_gaps(one) for one in rounds]
    alone = Distribution.of(np.concatenate([quiet for quiet, _ in parts]))
    among = Distribution.of(np.concatenate([disturbed for _, disturbed in parts]))
    ratios = {}
    if alone and among:
        ratios = {name: getattr(among, name) / max(getattr(alone, name), 1e-9) for name in ("mean", "p50", "p99")}
    return {"quiet_itl_ms": _in_ms(alone), "disturbed_itl_ms": _in_ms(among), "ratio": ratios}


def split_gaps(one: Round) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The decodes' gaps in seconds, (quiet, disturbed)."""
    pairs = [
        pair
        for record in one.records
        if record.kind == "decode" and not record.failed
        for pair in zip(record.token_times, record.token_times[1:], strict=False)
    ]
    begins, ends = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    waits = np.array(_merged(long_waits(one)), dtype=np.float64).reshape(-1, 2)
    first_open = np.searchsorted(waits[:, 1], begins, side="right")
    starts = np.append(waits[:, 0], np.inf)
    hit = starts[first_open] < ends
    return (ends - begins)[~hit], (ends - begins)[hit]


def _merged(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def long_waits(one: Round) -> list[tuple[float, float]]:
    """From when each long prompt was sent to its first token, or to the end."""
    sent = [record for record in one.records if record.kind == "long" and record.sent is not None]
    return [(r.sent or 0.0, r.token_times[0] if r.token_times else (r.done or one.ended)) for r in sent]


def _phases(records: Sequence[Record]) -> dict[str, Any]:
    """Of each number in the server's `timings`, whose names and units are the server's."""
    names = dict.fromkeys(name for record in records for name in record.timings)
    found = {name: Distribution.of([r.timings[name] for r in records if name in r.timings]) for name in names}
    return {
        name: {"p50": figures.p50, "p90": figures.p90, "p99": figures.p99, "max": figures.max}
        for name, figures in found.items()
        if figures is not None
    }
