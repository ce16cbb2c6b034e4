"""A run on disk: one JSON object with its summary and all its requests."""

import json
from pathlib import Path
from typing import Any

from loadtest.errors import SettingError
from loadtest.record import Record
from loadtest.runner import Round
from loadtest.summary import Run

FORMAT = 1


def run_to_json(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """Times of a round's requests count from its start."""
    rounds = [
        {
            "duration": one.ended - one.started,
            "interrupted": one.interrupted,
            "requests": [record.to_json(one.started) for record in one.records],
        }
        for one in run.rounds
    ]
    return {"format": FORMAT, **summary, "settings": run.settings, "rounds_detail": rounds}


def read_run(path: Path) -> tuple[Run, dict[str, Any]]:
    """The run and its summary. Of a file with two servers' runs: `SettingError`, as for what is not a run."""
    try:
        data = json.loads(path.read_text())
        if "runs" in data:
            raise SettingError(f"{path} has the runs of two servers, which it compares itself")
        if data["format"] != FORMAT:
            raise SettingError(f"{path} has format {data['format']}, not {FORMAT}")
        rounds = [_round(one) for one in data["rounds_detail"]]
        run = Run(label=data["label"], settings=data["settings"], rounds=rounds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} is not a saved run: {error!r}") from error
    summary = {name: value for name, value in data.items() if name not in ("format", "settings", "rounds_detail")}
    return run, summary


def _round(data: dict[str, Any]) -> Round:
    records = [Record.from_json(request) for request in data["requests"]]
    return Round(started=0.0, ended=data["duration"], records=records, interrupted=data["interrupted"])
