"""Real processes, started, heard and ended by the tests that need them. Only pids started here are ever signalled."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT = 90.0
STOP_TIMEOUT = 5.0
"""What the README promises for Ctrl-C."""


def wait_until(holds, what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        pause.wait(0.02)


@dataclass
class Command:
    """One running `pdserve ...`, with all that it printed."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self.process.poll() is None:
            self.process.terminate()
        self.wait(STOP_TIMEOUT)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait(self, timeout: float) -> int:
        status = self.process.wait(timeout)
        assert self.reader is not None
        self.reader.join(timeout)
        return status


def start_command(*argv: str) -> Command:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.command", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    command = Command(process)
    command.reader = threading.Thread(target=command.read, name="reader")
    command.reader.start()
    return command


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_by_names() -> set[str]:
    """What a process could leave behind outside of itself."""
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    sockets = {str(path) for path in Path("/tmp").glob("*pdserve*")}
    return shared | sockets


@dataclass
class UpRing:
    """A ring started by `pdserve up`."""

    command: Command
    url: str
    processes: list[dict[str, Any]]

    def pid(self, name: str) -> int:
        return self._process(name)["pid"]

    def state(self, name: str) -> dict[str, Any]:
        return httpx.get(f"{self._process(name)['admin_url']}/debug/state").raise_for_status().json()

    def metrics(self, name: str) -> dict[str, float]:
        """Sum of each metric over its labels."""
        text = httpx.get(f"{self._process(name)['admin_url']}/metrics").raise_for_status().text
        totals: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name_and_labels, _, value = line.rpartition(" ")
                key = name_and_labels.partition("{")[0]
                totals[key] = totals.get(key, 0.0) + float(value)
        return totals

    @property
    def nodes(self) -> list[str]:
        return [process["name"] for process in self.processes if process["role"] != "server"]

    def is_quiescent(self) -> bool:
        return all(_is_at_rest(self.state(name)) for name in self.nodes)

    def wait_until_quiescent(self) -> None:
        wait_until(self.is_quiescent, f"at rest: {[self.state(name) for name in self.nodes]}")

    def _process(self, name: str) -> dict[str, Any]:
        return next(process for process in self.processes if process["name"] == name)


def _is_at_rest(state: dict[str, Any]) -> bool:
    blocks, transfers = state["blocks"], state["transfers"]
    return (
        blocks["free"] == blocks["total"]
        and not any(state["queues"].values())
        and not transfers["outgoing"]
        and not transfers.get("incoming")
        and not transfers.get("quarantined")
        and not transfers["leases"]
    )


@contextmanager
def running_up(directory: Path, *flags: str, expect_clean_end: bool = True) -> Iterator[UpRing]:
    """`pdserve up` with a ready file in `directory`; ends with Ctrl-C and nothing left."""
    before = left_by_names()
    ready_file = directory / "ready.json"
    command = start_command("up", "--port", "0", "--ready-file", str(ready_file), "--debug-state", *flags)
    pids: list[int] = []
    try:
        wait_until(lambda: ready_file.exists() or command.process.poll() is not None, f"ready: {flags}", START_TIMEOUT)
        assert ready_file.exists(), command.output
        ready = json.loads(ready_file.read_text())
        pids = [process["pid"] for process in ready["processes"]]
        yield UpRing(command, ready["url"], ready["processes"])
        if expect_clean_end:
            began = time.monotonic()
            command.process.send_signal(signal.SIGINT)
            assert command.wait(STOP_TIMEOUT) == 0, command.output
            assert time.monotonic() - began < STOP_TIMEOUT
            assert not [pid for pid in pids if is_running(pid)], command.output
            assert left_by_names() <= before
    finally:
        _end(command, pids)


def _end(command: Command, pids: Sequence[int]) -> None:
    """For a test that failed: nothing of it may go on."""
    if command.process.poll() is None:
        command.process.kill()
    command.wait(STOP_TIMEOUT)
    wait_until(lambda: not [pid for pid in pids if is_running(pid)], f"children of {command.process.pid} gone")
    if command.process.stdout is not None:
        command.process.stdout.close()
