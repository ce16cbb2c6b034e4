"""One HTML file with everything in it: figures as tables, charts as inline SVG, no scripts, light and dark."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from loadtest.charts import Chart, gap_chart, latency_charts, throughput_chart
from loadtest.comparison import Ratio
from loadtest.summary import METRICS, Run
from loadtest.table import facts, interval_words

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #667; --paper: #fff; --rule: #d9dde2; --bad: #b3261e;
  --good: #1a7f37; --c0: #2563c9; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --long: #c2410c }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa4ae; --paper: #14181c; --rule: #323a42;
  --bad: #ff8a80; --good: #6fdd8b; --c0: #7ab0ff; --c1: #ff9d66; --c2: #6fdd8b; --c3: #cf9dff; --long: #ff9d66 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1320px;
  margin: 0 auto; padding: 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.tables, .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr));
  gap: 1rem 2rem }
table { border-collapse: collapse; align-self: start; font-variant-numeric: tabular-nums; margin: .5rem 0; width: 100% }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top }
th:first-child { text-align: left; font-weight: 500 } td.words { text-align: left }
figure { margin: 0 } figcaption { font-weight: 600 } figure p { margin: 0; color: var(--soft); font-size: 13px }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: var(--soft) }
.grid { stroke: var(--rule); stroke-width: 1 } .line { fill: none; stroke-width: 2 }
.thin { stroke-width: 1; opacity: .7 }
.dots { fill: none; stroke-width: 3; stroke-linecap: round; opacity: .55 } .marks { fill: none; stroke-width: 1 }
.c0 { stroke: var(--c0) } .c1 { stroke: var(--c1) } .c2 { stroke: var(--c2) } .c3 { stroke: var(--c3) }
.arrival { stroke: var(--soft) } .long { stroke: var(--long); opacity: .5 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em } .clean { color: var(--good) }
.bad { color: var(--bad); font-weight: 600 }
.k0 { background: var(--c0) } .k1 { background: var(--c1) } .k2 { background: var(--c2) } .k3 { background: var(--c3) }
"""
_COLUMNS = ("median", "p90", "p99", "max", "mean")


def write_report(path: Path, runs: Sequence[Run], summaries: Sequence[dict[str, Any]], ratios: Sequence[Ratio]) -> None:
    path.write_text(render_report(runs, summaries, ratios), encoding="utf-8")


def render_report(runs: Sequence[Run], summaries: Sequence[dict[str, Any]], ratios: Sequence[Ratio]) -> str:
    charts = latency_charts(runs)
    if all(run.rounds for run in runs):
        charts += [chart for run in runs if (chart := gap_chart(run)) is not None]
        charts.append(throughput_chart(runs))
    sections = [_run_section(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Load test</h1>"
        + "".join(sections)
        + (_ratio_section(runs, ratios) if ratios else "")
        + f'<h2>Charts</h2><div class="charts">{"".join(map(_figure, charts))}</div>'
        + "".join(_settings_section(run) for run in runs)
        + "</body></html>\n"
    )


def _run_section(run: Run, summary: dict[str, Any]) -> str:
    verdict = '<p class="clean">Clean: the client was not the bottleneck.</p>'
    if not summary["clean"]:
        verdict = f'<p class="bad">Not clean: {escape("; ".join(summary["not_clean"]))}</p>'
    if summary["interrupted"]:
        verdict += '<p class="bad">Interrupted: these are the figures until then.</p>'
    tables = [_facts_table(summary), _latency_table("Latency, ms", summary)]
    tables += [_latency_table(f"{kind}, ms", figures) for kind, figures in summary.get("kinds", {}).items()]
    if interference := summary.get("interference"):
        rows = {"no long prompt waiting": interference["quiet_itl_ms"], "a long one": interference["disturbed_itl_ms"]}
        tables.append(_figures_table("ITL of the decodes, ms", rows))
    if phases := summary.get("phases_ms"):
        tables.append(_figures_table("Server's timings, in its units", phases))
    if summary["errors"]:
        tables.append(_error_table(summary["errors"]))
    return f'<h2>{escape(run.label)}</h2>{verdict}<div class="tables">{"".join(tables)}</div>'


def _facts_table(summary: dict[str, Any]) -> str:
    rows = [f'<tr><th scope="row">{escape(name)}</th>{_words(value)}</tr>' for name, value in facts(summary)]
    return f"<table>{''.join(rows)}</table>"


def _latency_table(title: str, figures: dict[str, Any]) -> str:
    rows = [
        (metric.upper(), [f"{figures[f'{column}_{metric}_ms']:.2f}" for column in _COLUMNS])
        for metric in METRICS
        if f"mean_{metric}_ms" in figures
    ]
    return _table(title, ("p50", *_COLUMNS[1:]), rows)


def _figures_table(title: str, rows: dict[str, dict[str, float] | None]) -> str:
    columns = ("p50", "p90", "p99", "max")
    found = [(name, [f"{figures[column]:.2f}" for column in columns]) for name, figures in rows.items() if figures]
    return _table(title, columns, found)


def _error_table(errors: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(error["kind"])}</th><td>{error["count"]}</td>{_words(error["first"] or "")}</tr>'
        for error in errors
    )
    head = '<tr><td></td><th scope="col">count</th><th scope="col">first message</th></tr>'
    return f"<table><caption>Errors</caption>{head}{rows}</table>"


def _ratio_section(runs: Sequence[Run], ratios: Sequence[Ratio]) -> str:
    rows = [
        (
            ratio.name,
            [f"{ratio.first:.2f}", f"{ratio.second:.2f}", f"{ratio.ratio:.3f}", interval_words(ratio)],
        )
        for ratio in ratios
    ]
    title = f"{runs[1].label} against {runs[0].label}"
    return f"<h2>Comparison</h2>{_table(title, ('first', 'second', 'ratio', '95 % interval'), rows)}"


def _settings_section(run: Run) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th>{_words(str(value))}</tr>' for name, value in _flat(run.settings)
    )
    return f"<details><summary>Settings, {escape(run.label)}</summary><table>{rows}</table></details>"


def _flat(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """Groups of flags are not shown as groups; flags left out neither."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value)
        elif value is not None:
            found.append((name, value))
    return found


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return f"<table><caption>{escape(title)}</caption><tr><td></td>{head}</tr>{body}</table>"


def _words(text: str) -> str:
    return f'<td class="words">{escape(text)}</td>'


def _figure(chart: Chart) -> str:
    keys = "".join(f'<span class="key k{colour}"></span>{escape(name)}' for colour, name in enumerate(chart.legend))
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg}<p>{keys}</p>{note}</figure>"
