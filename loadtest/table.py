"""The summary and the comparison for a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.comparison import Ratio
from loadtest.summary import METRICS

_COLUMNS = ("median", "p90", "p99", "max", "mean")
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    console.print()
    console.print(Text(summary["label"], style="bold"), _verdict(summary))
    parts: list[Table | Text] = [_facts(summary), _latency_table(summary, "ms")]
    parts += [_latency_table(of_kind, f"{kind}, ms") for kind, of_kind in summary.get("kinds", {}).items()]
    if interference := summary.get("interference"):
        parts.append(
            _figures_table(
                "ITL of the decodes, ms",
                {
                    "no long prompt waiting": interference["quiet_itl_ms"],
                    "a long prompt waiting": interference["disturbed_itl_ms"],
                },
            )
        )
    if phases := summary.get("phases_ms"):
        parts.append(_figures_table("server's timings, in its units", phases))
    if summary["errors"]:
        parts.append(_error_table(summary["errors"]))
    console.print(Group(*parts))


def _verdict(summary: dict[str, Any]) -> Text:
    interrupted = "  interrupted" if summary["interrupted"] else ""
    if summary["clean"]:
        return Text("clean" + interrupted, style="green")
    return Text("NOT CLEAN: " + "; ".join(summary["not_clean"]) + interrupted, style="bold red")


def _facts(summary: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts(summary):
        table.add_row(name, value)
    return table


def facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that are not latencies, in words."""
    usage, client = summary["usage"], summary["client"]
    requests = f"{summary['completed']} completed, {summary['failed']} failed, {summary['unfinished']} cut off"
    if summary["left_out"]:
        requests += f", {summary['left_out']} left out as too long"
    rounds = f" in {summary['rounds']} rounds" if summary["rounds"] > 1 else ""
    found = [
        ("requests", f"{requests}, {summary['duration']:.2f} s{rounds}"),
        (
            "throughput",
            f"{summary['request_throughput']:.3f} requests/s, {summary['output_throughput']:.1f} output tokens/s, "
            f"{summary['total_token_throughput']:.1f} tokens/s in all",
        ),
    ]
    if "request_goodput" in summary:
        bounds = " ".join(f"{metric}:{bound:g}" for metric, bound in summary["objectives_ms"].items())
        share = f"{summary['goodput_share']:.1%} of the requests"
        found.append(("goodput", f"{summary['request_goodput']:.3f} requests/s, {share} within {bounds} ms"))
    found.append(("server's usage", _usage_words(usage)))
    found.append(("client", _client_words(client)))
    return found


def _usage_words(usage: dict[str, Any]) -> str:
    if not usage["requests_with_usage"]:
        return "not sent; tokens are counted as events"
    asked = f" for {usage['asked_prompt_tokens']} asked" if usage["asked_prompt_tokens"] else ""
    return (
        f"prompts {usage['prompt_tokens']} tokens{asked}, "
        f"{usage['cached_tokens']} from its cache; answers {usage['completion_tokens']} for "
        f"{usage['asked_completion_tokens']} asked, in {usage['token_events']} events"
    )


def _client_words(client: dict[str, Any]) -> str:
    words = f"{client['cpu_share']:.1%} of a core"
    for name, what in (("schedule_lag_ms", "schedule lag"), ("loop_lag_ms", "event loop lag")):
        if figures := client[name]:
            words += f"; {what} p50 {figures['p50']:.2f}, p99 {figures['p99']:.2f}, max {figures['max']:.2f} ms"
    return words


def _latency_table(figures: dict[str, Any], title: str) -> Table:
    table = _table(title, ("p50", *_COLUMNS[1:]))
    for metric in METRICS:
        if f"mean_{metric}_ms" in figures:
            table.add_row(_NAMES[metric], *(f"{figures[f'{column}_{metric}_ms']:.2f}" for column in _COLUMNS))
    return table


def _figures_table(title: str, rows: dict[str, dict[str, float] | None]) -> Table:
    table = _table(title, ("p50", "p90", "p99", "max"))
    for name, figures in rows.items():
        if figures:
            table.add_row(name, *(f"{figures[column]:.2f}" for column in ("p50", "p90", "p99", "max")))
    return table


def _error_table(errors: Sequence[dict[str, Any]]) -> Table:
    table = _table("errors", ("count",))
    table.add_column("first message")
    for error in errors:
        table.add_row(Text(error["kind"]), str(error["count"]), Text(error["first"] or ""))
    return table


def print_comparison(console: Console, labels: tuple[str, str], ratios: Sequence[Ratio]) -> None:
    """Both labels may be the same; the columns say which is which."""
    console.print()
    console.print(Text(f"{labels[1]} against {labels[0]}", style="bold"))
    table = _table("", ("first", "second", "ratio", "95 % interval"))
    for ratio in ratios:
        table.add_row(
            ratio.name,
            f"{ratio.first:.2f}",
            f"{ratio.second:.2f}",
            f"{ratio.ratio:.3f}",
            Text(interval_words(ratio), style="bold" if ratio.is_a_difference else "dim"),
        )
    console.print(table)


def interval_words(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return "one round only"
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="italic", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
