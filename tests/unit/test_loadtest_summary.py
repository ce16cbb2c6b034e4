"""Figures of records whose right values are worked out by hand."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from loadtest.comparison import Ratio, compare
from loadtest.errors import SettingError
from loadtest.goodput import Objectives
from loadtest.own_load import OwnLoad
from loadtest.percentiles import Distribution
from loadtest.record import UNFINISHED, Record
from loadtest.report import render_report
from loadtest.run_file import read_run, run_to_json
from loadtest.runner import Round
from loadtest.summary import Bounds, Run, split_gaps, summarize
from loadtest.svg import Axis, Plot

BOUNDS = Bounds(max_cpu_share=0.8, max_lag=0.025)
NO_OBJECTIVES = Objectives()


def make_record(start: float = 100.0, *gaps: float, kind: str = "chat", **fields: Any) -> Record:
    """A complete one: `gaps` from the start to the first token, and on to each next."""
    times = np.cumsum([start, *gaps])[1:].tolist()
    values: dict[str, Any] = {
        "kind": kind,
        "conversation": 0,
        "turn": 0,
        "intended": start,
        "released": start,
        "sent": start,
        "token_times": times,
        "done": times[-1] if times else None,
        "prompt_tokens": 10,
        "completion_tokens": len(times),
        "asked_input_tokens": 9,
        "asked_output_tokens": len(times),
    }
    return Record(**(values | fields))


def make_failed(kind: str, error: str, start: float = 100.0) -> Record:
    record = make_record(start)
    record.fail(kind, error)
    return record


def make_run(*records: Record, ended: float = 110.0, label: str = "server", load: OwnLoad | None = None) -> Run:
    one = Round(started=100.0, ended=ended, records=list(records))
    return Run(label=label, settings={"seed": 1}, rounds=[one], loads=[load or OwnLoad(1.0, 10.0, [0.001])])


def test_percentiles_are_those_of_numpy() -> None:
    values = Random(3).choices(range(1000), k=457)
    figures = Distribution.of(values)
    assert figures is not None
    assert [figures.p50, figures.p90, figures.p99] == np.percentile(values, [50, 90, 99]).tolist()
    assert (figures.max, figures.count) == (max(values), 457)
    assert Distribution.of([1.0, 2.0]) == Distribution(count=2, mean=1.5, std=0.5, p50=1.5, p90=1.9, p99=1.99, max=2.0)
    assert Distribution.of([]) is None


def test_latencies_of_a_record() -> None:
    record = make_record(100.0, 1.0, 0.5, 0.25, done=102.0, sent=100.5)
    assert (record.ttft, record.itl, record.e2el) == (1.0, [0.5, 0.25], 2.0)
    assert record.tpot == 0.75 / 2
    # Four tokens in three events: the gaps are between events, the time per token is not.
    record.completion_tokens = 4
    assert record.tpot == 0.75 / 3
    assert make_record(100.0, 1.0).tpot is None


def test_a_summary_under_the_names_of_vllm() -> None:
    records = [
        make_record(100.0, 1.0, 0.5, 0.5),
        make_record(101.0, 2.0, 0.5, 1.5),
        make_failed("http_500", "first"),
        make_failed("http_500", "second"),
        make_failed("connect", "refused"),
        make_record(109.0, 0.5, 1.0, done=None, error_kind=UNFINISHED, completion_tokens=None),
    ]
    summary = summarize(make_run(*records), Objectives.parse(["ttft:1500", "tpot:600"]), BOUNDS)
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (2, 3, 1)
    assert summary["duration"] == 10
    assert summary["request_throughput"] == 0.2
    # 3 + 3, and of the one that was cut off the token that came before the end.
    assert summary["output_throughput"] == pytest.approx(0.7)
    assert summary["total_token_throughput"] == pytest.approx(2.7)
    assert summary["request_goodput"] == 0.1
    assert summary["goodput_share"] == pytest.approx(1 / 6)
    assert summary["median_ttft_ms"] == pytest.approx(1000)  # 500, 1000, 2000: also of what was cut off
    assert summary["mean_tpot_ms"] == pytest.approx(750)
    assert summary["max_itl_ms"] == pytest.approx(1500)
    assert summary["p99_e2el_ms"] == pytest.approx(3980)
    assert summary["errors"] == [
        {"kind": "http_500", "count": 2, "first": "first"},
        {"kind": "connect", "count": 1, "first": "refused"},
    ]
    usage = summary["usage"]
    assert (usage["prompt_tokens"], usage["asked_prompt_tokens"], usage["token_events"]) == (20, 18, 6)
    assert (summary["clean"], summary["interrupted"]) == (True, False)


def test_throughput_counts_what_came_in_the_window() -> None:
    late = make_record(108.0, 1.0, 2.0, 2.0, 2.0)
    summary = summarize(make_run(late), Objectives.parse(["e2el:60000"]), BOUNDS)
    assert summary["output_throughput"] == pytest.approx(0.1)
    assert summary["request_throughput"] == 0
    assert summary["request_goodput"] == 0
    assert summary["completed"] == 1


def test_objectives() -> None:
    assert Objectives.parse(["ttft:200", "e2el:1e3"]).bounds == {"ttft": 0.2, "e2el": 1.0}
    at_the_bound, one_token = make_record(100.0, 0.25, 0.5), make_record(100.0, 0.25)
    assert Objectives({"ttft": 0.25, "tpot": 0.5}).met_by(at_the_bound)
    assert not Objectives({"ttft": 0.249}).met_by(at_the_bound)
    assert Objectives({"tpot": 0.1}).met_by(one_token)
    assert not Objectives().met_by(make_failed("connect", ""))


@pytest.mark.parametrize(
    ("load", "record", "reason"),
    [
        (OwnLoad(8.1, 10.0), make_record(100.0, 1.0), "81% of a core, over 80%"),
        (OwnLoad(1.0, 10.0), make_record(100.0, 1.0, released=100.03), "left 30.0 ms late"),
        (OwnLoad(1.0, 10.0, [0.03]), make_record(100.0, 1.0), "event loop woke 30.0 ms late"),
    ],
)
def test_a_client_that_was_the_bottleneck_is_not_clean(load: OwnLoad, record: Record, reason: str) -> None:
    summary = summarize(make_run(record, load=load), NO_OBJECTIVES, BOUNDS)
    assert not summary["clean"]
    assert reason in summary["not_clean"][0]


def test_gaps_are_parted_by_whether_a_long_prompt_was_waiting() -> None:
    decode = make_record(100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, kind="decode")  # gaps end at 102, ..., 106
    long_prompts = [
        make_record(102.5, 0.25, kind="long"),
        make_record(104.5, 1.0, kind="long"),
        make_record(104.75, 0.5, kind="long"),
    ]
    one = Round(started=100.0, ended=106.0, records=[decode, *long_prompts])
    quiet, disturbed = split_gaps(one)
    assert (len(quiet), len(disturbed)) == (2, 3)  # 102..103, 104..105, 105..106
    summary = summarize(make_run(decode, *long_prompts), NO_OBJECTIVES, BOUNDS)
    assert summary["interference"]["ratio"]["p50"] == pytest.approx(1.0)
    assert summary["kinds"]["long"]["completed"] == 3
    alone, nothing = split_gaps(Round(started=100.0, ended=106.0, records=[decode]))
    assert (len(alone), len(nothing)) == (5, 0)


def test_a_run_read_back_gives_the_same_figures(tmp_path: Path) -> None:
    run = make_run(make_record(100.5, 1.0, 0.5), make_failed("http_500", "x"), make_record(101.0, 0.5, done=None))
    summary = summarize(run, NO_OBJECTIVES, BOUNDS)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_to_json(run, summary)))
    read, read_summary = read_run(file)
    assert read_summary == summary
    again = summarize(read, NO_OBJECTIVES, BOUNDS)
    for name, value in summary.items():
        if name not in ("client", "clean", "not_clean"):
            assert again[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    (request, *_) = json.loads(file.read_text())["rounds_detail"][0]["requests"]
    assert {"ttft", "tpot", "itl", "e2el"} <= request.keys()
    assert request["start"] == 0.5


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 99}', '{"runs": []}'])
def test_what_is_not_a_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(SettingError):
        read_run(tmp_path / "f")


def noisy_run(seed: int, factor: float, num_rounds: int = 5) -> Run:
    """TTFT 1 s and gaps of 0.1 s on average, times `factor`; rounds differ by 10 %, the same for every seed."""
    rng, common = Random(seed), Random(99)
    rounds = []
    for _ in range(num_rounds):
        pace = factor * common.uniform(0.9, 1.1)
        gaps = [[pace * rng.uniform(0.8, 1.2) * mean for mean in (1.0, *[0.1] * 20)] for _ in range(20)]
        rounds.append(Round(started=100.0, ended=100 + 10 * pace, records=[make_record(100.0, *one) for one in gaps]))
    return Run(label=f"x{factor}", settings={}, rounds=rounds)


def ratios_of(first: Run, second: Run) -> dict[str, Ratio]:
    return {ratio.name: ratio for ratio in compare(first, second)}


def test_intervals_hold_the_true_ratio_and_leave_out_1_only_where_there_is_a_difference() -> None:
    same = ratios_of(noisy_run(1, 1.0), noisy_run(2, 1.0))
    slower = ratios_of(noisy_run(1, 1.0), noisy_run(2, 1.25))
    for name in ("ttft mean", "ttft p50", "itl mean", "itl p50", "tpot mean", "e2el mean"):
        assert not same[name].is_a_difference, name
        assert slower[name].is_a_difference, name
        low, high = slower[name].low, slower[name].high
        assert low is not None
        assert high is not None
        assert low < 1.25 < high
        assert high / low < 1.2
    assert slower["output_throughput"].ratio == pytest.approx(0.8, rel=0.03)
    assert slower["output_throughput"].is_a_difference
    assert slower["ttft mean"].to_json()["differs"] is True


def test_rounds_that_took_turns_are_drawn_together() -> None:
    """The rounds differ by 10 %, alike for both: what the two have in common is not in the interval."""
    paired = ratios_of(noisy_run(1, 1.0), noisy_run(2, 1.0))["ttft mean"]
    unpaired = noisy_run(2, 1.0, num_rounds=4)
    apart = ratios_of(noisy_run(1, 1.0), unpaired)["ttft mean"]
    assert paired.low is not None
    assert paired.high is not None
    assert apart.low is not None
    assert apart.high is not None
    assert paired.high - paired.low < apart.high - apart.low


def test_one_round_gives_no_interval_of_throughput() -> None:
    ratio = ratios_of(noisy_run(1, 1.0, 1), noisy_run(2, 1.0, 1))["output_throughput"]
    assert (ratio.low, ratio.is_a_difference) == (None, False)


class Document(HTMLParser):
    """What a report holds; `open_tags` must be empty in the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open_tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


def render(*runs: Run) -> str:
    summaries = [summarize(run, NO_OBJECTIVES, BOUNDS) for run in runs]
    return render_report(runs, summaries, compare(runs[0], runs[1]) if len(runs) == 2 else [])


def test_a_report_is_one_document_without_scripts_or_anything_from_elsewhere() -> None:
    text = render(noisy_run(1, 1.0), noisy_run(2, 2.0))
    document = Document(text)
    assert document.open_tags == []
    assert document.tags.count("svg") == 4 + 2 + 1
    assert not {"script", "link", "img", "iframe", "object"} & set(document.tags)
    assert not {name for name, _ in document.attributes} & {"src", "href", "onload", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    for part in text.split("<svg")[1:]:
        drawing = ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        assert drawing.get("aria-label")
        for path in drawing.iter("path"):
            assert "nan" not in (path.get("d") or "")


def test_a_report_escapes_what_servers_say() -> None:
    run = make_run(make_failed("stream_error", "<script>alert(1)</script>"), make_record(100.0, 1.0, 1.0), label="<b>")
    text = render(run)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>" not in text


def test_a_report_of_next_to_nothing() -> None:
    for run in (make_run(), make_run(make_failed("connect", "x")), make_run(make_record(100.0, 0.0, 0.0))):
        assert Document(render(run)).open_tags == []


def test_long_prompts_are_marked_where_they_arrived() -> None:
    decode = make_record(100.0, *[0.5] * 20, kind="decode")
    arrivals = [102.0, 105.0]
    run = make_run(decode, *(make_record(start, 0.5, kind="long") for start in arrivals))
    path = next(part for part in render(run).split("<path ") if part.startswith('class="marks long"'))
    xs = [float(step.split()[0]) for step in path.split('d="M')[1].split('"')[0].split("M")]
    # The axis runs from 58 to 628 over 10 s.
    assert xs == pytest.approx([58 + 57 * (start - 100) for start in arrivals], abs=0.1)


def test_axes() -> None:
    assert Axis(label="", low=0, high=10).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis(label="", low=0.0, high=0.31).ticks() == pytest.approx([0, 0.1, 0.2, 0.3])
    logarithmic = Axis(label="", low=0.5, high=2000, logarithmic=True)
    assert logarithmic.ticks() == [1, 10, 100, 1000]
    assert logarithmic.part(0.5) == 0
    assert logarithmic.part(2000) == pytest.approx(1)
    assert logarithmic.part(0) == 0
    assert Axis(label="", low=3, high=3).part(3) == 0
    plot = Plot(title="a & b", x=Axis(label="x", low=0, high=1), y=Axis(label="y", low=0, high=1))
    plot.line([(0, 0), (1, 1)], "c0", "<name>")
    assert 'd="M58.0 240.0L628.0 10.0"' in plot.render()
    assert "a &amp; b" in plot.render()
