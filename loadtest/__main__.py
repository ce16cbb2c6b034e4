"""`pdserve loadtest`: flags to config, measure, figures out, exit code.

0: there is a summary, clean or not; also after Ctrl-C. 1: the server cannot be tested, or nothing completed.
2: a setting is wrong.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
import uvloop
from rich.console import Console

from loadtest.comparison import Ratio, compare
from loadtest.config import CompareConfig, LoadTestConfig, OutputConfig
from loadtest.errors import LoadTestError, SettingError
from loadtest.goodput import Objectives
from loadtest.measure import measure, sides_of
from loadtest.report import write_report
from loadtest.run_file import read_run, run_to_json
from loadtest.summary import Bounds, Run, summarize
from loadtest.table import print_comparison, print_summary

PROG = "pdserve loadtest"
EXIT_NOTHING_MEASURED, EXIT_BAD_SETTING = 1, 2


def main(argv: Sequence[str]) -> int:
    try:
        if argv and argv[0] == "compare":
            return _compare(argv[1:])
        return _load_test(tyro.cli(LoadTestConfig, args=argv, prog=PROG, config=(tyro.conf.OmitArgPrefixes,)))
    except LoadTestError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING if isinstance(error, SettingError) else EXIT_NOTHING_MEASURED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{PROG}: interrupted", file=sys.stderr)
        return EXIT_NOTHING_MEASURED


def _load_test(config: LoadTestConfig) -> int:
    output = config.output
    seed = config.load.seed if config.load.seed is not None else time.time_ns() % (1 << 31)
    settings = {"seed": seed, "started": time.time(), **_plain(asdict(config))}
    sides = sides_of(config, os.environ.get("OPENAI_API_KEY"))
    progress = Console(stderr=True, quiet=not output.progress)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runs = runner.run(measure(config, sides, seed, settings, progress))
    summaries = [summarize(run, Objectives.parse(output.goodput), _bounds(output)) for run in runs]
    ratios = compare(runs[0], runs[1]) if len(runs) == 2 else []
    _print(runs, summaries, ratios, seed)
    _write(output, runs, summaries, ratios)
    return 0 if all(summary["completed"] for summary in summaries) else EXIT_NOTHING_MEASURED


def _bounds(output: OutputConfig) -> Bounds:
    return Bounds(max_cpu_share=output.max_cpu_share, max_lag=output.max_lag_ms / 1000)


def _print(runs: Sequence[Run], summaries: Sequence[dict[str, Any]], ratios: Sequence[Ratio], seed: int) -> None:
    console = Console()
    for summary in summaries:
        print_summary(console, summary)
    if len(runs) == 2:
        print_comparison(console, (runs[0].label, runs[1].label), ratios)
    console.print(f"\nseed {seed}")


def _write(
    output: OutputConfig, runs: Sequence[Run], summaries: Sequence[dict[str, Any]], ratios: Sequence[Ratio]
) -> None:
    """One run's file is the run; two servers' has both, and the ratios."""
    if output.json is not None:
        files = [run_to_json(run, summary) for run, summary in zip(runs, summaries, strict=True)]
        compared = {ratio.name: ratio.to_json() for ratio in ratios}
        output.json.write_text(json.dumps(files[0] if len(files) == 1 else {"runs": files, "comparison": compared}))
    if output.html is not None:
        write_report(output.html, runs, summaries, ratios)


def _compare(argv: Sequence[str]) -> int:
    config = tyro.cli(CompareConfig, args=argv, prog=f"{PROG} compare", config=(tyro.conf.OmitArgPrefixes,))
    (first, summary1), (second, summary2) = read_run(config.first), read_run(config.second)
    runs, summaries = [first, second], [summary1, summary2]
    ratios = compare(first, second)
    print_comparison(Console(), (first.label, second.label), ratios)
    for summary in summaries:
        if not summary["clean"]:
            print(f"NOT CLEAN, {summary['label']}: {'; '.join(summary['not_clean'])}")
    if config.html is not None:
        write_report(config.html, runs, summaries, ratios)
    return 0


def _plain(value: Any) -> Any:
    """For JSON; paths become text."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
