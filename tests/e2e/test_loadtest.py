"""`pdserve loadtest` as a process: against nodes whose delays are chosen and logged, and against a real ring."""

import json
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connector.server_messages import Generate
from tests.e2e.processes import Command, UpRing, start_command
from tests.server_rig import FakeNode, RunningServer, fails, running_server, wait_for, write_model_directory

TIMEOUT = 60.0
DELIVERY = 0.02
"""Seconds from a node's send to the client's stamp, for most tokens, on a busy machine."""


class PacedNode(FakeNode):
    """Sends a token after `delay(request, position)` each, and logs when it did. Unpaced at first."""

    def __init__(self) -> None:
        super().__init__()
        self.token_id = 0
        self.delay: Callable[[int, int], float] = lambda request, position: 0.0
        self.log: list[list[float]] = []
        self.threads: list[threading.Thread] = []
        self.script = self._start

    def _start(self, _: FakeNode, generate: Generate) -> None:
        number = len(self.log)
        self.log.append([time.perf_counter()])
        self.threads.append(threading.Thread(target=self._answer, args=(generate, number), name="paced"))
        self.threads[-1].start()

    def _answer(self, generate: Generate, number: int) -> None:
        pause, last = threading.Event(), generate.sampling.max_tokens
        for position in range(last):
            pause.wait(self.delay(number, position))
            end = {"finish_reason": "length"} if position + 1 == last else {}
            self.log[number].append(time.perf_counter())
            self.send_output(generate.request_id, [self.token_id], **end)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(10)
        super().close()


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[tuple[PacedNode, RunningServer]]:
    node = PacedNode()
    with running_server(write_model_directory(tmp_path), [node.address]) as server:
        server.wait_ready()
        (node.token_id,) = server.encode("a")
        yield node, server
        node.close()


def start(url: str, *flags: str) -> Command:
    return start_command("loadtest", "--base-url", url, "--endpoint", "completions", "--seed", "1", *flags)


def run(url: str, *flags: str, status: int = 0) -> str:
    command = start(url, *flags)
    try:
        assert command.wait(TIMEOUT) == status, command.output
        return command.output
    finally:
        command.close()


def requests_of(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads(file.read_text())
    return summary, [request for one in summary["rounds_detail"] for request in one["requests"]]


SMALL = ("--input-tokens", "20", "--output-tokens", "12", "--warmup", "1", "--no-calibrate")


def test_figures_are_those_of_the_node_that_paced_the_tokens(
    paced: tuple[PacedNode, RunningServer], tmp_path: Path
) -> None:
    """One request at a time, so that the node's log and the client's records are in the same order."""
    node, server = paced
    stalls = {(2, 5), (4, 7), (5, 1)}
    node.delay = lambda request, position: 0.08 if position == 0 else 0.2 if (request, position) in stalls else 0.005
    output = run(server.url, *SMALL, "--concurrency", "1", "--num-requests", "6", "--json", str(tmp_path / "run"))
    assert "6 completed, 0 failed" in output

    summary, requests = requests_of(tmp_path / "run")
    log = node.log[1:]  # after the warm-up
    assert [len(request["itl"]) for request in requests] == [11] * 6
    assert summary["total_output_tokens"] == 72
    assert summary["usage"]["token_events"] == 72
    off = []
    for request, times in zip(requests, log, strict=True):
        assert request["ttft"] > times[1] - times[0] >= 0.08
        # The first token may be on its way for a while, no token may be seen before it was sent.
        assert request["ttft"] + sum(request["itl"]) >= times[-1] - times[0]
        off += [
            abs(gap - (after - before))
            for gap, before, after in zip(request["itl"], times[1:], times[2:], strict=False)
        ]
    assert statistics.median(off) < DELIVERY
    long_gaps = {
        (number + 1, position)
        for number, request in enumerate(requests)
        for position, gap in enumerate(request["itl"], start=1)
        if gap > 0.15
    }
    in_log = {
        (number, position)
        for number, times in enumerate(log, start=1)
        for position in range(1, 12)
        if times[position + 1] - times[position] > 0.15
    }
    assert stalls <= in_log
    assert stalls <= long_gaps
    assert summary["max_itl_ms"] >= 150
    assert summary["median_ttft_ms"] >= 80


def test_an_open_loop_two_servers_in_turns_and_a_report(paced: tuple[PacedNode, RunningServer], tmp_path: Path) -> None:
    node, server = paced
    node.delay = lambda request, position: 0.002
    flags = ("--rate", "50", "--arrivals", "gamma", "--burstiness", "0.5", "--num-requests", "5", "--rounds", "3")
    files = ("--json", str(tmp_path / "both.json"), "--html", str(tmp_path / "report.html"))
    output = run(server.url, *SMALL, *flags, *files, "--against", server.url, "--goodput", "ttft:60000", "e2el:60000")
    assert output.count("15 completed, 0 failed") == 2
    assert "100.0% of the requests within ttft:60000 e2el:60000 ms" in output
    saved = json.loads((tmp_path / "both.json").read_text())
    assert [run["rounds"] for run in saved["runs"]] == [3, 3]
    assert saved["comparison"]["itl p50"]["low"] > 0
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 7
    assert "<script" not in report
    prompts = [tuple(generate.prompt_token_ids) for generate in node.generates]
    assert len(set(prompts)) == len(prompts)  # nobody's cache knows a prompt, whoever was asked first


def test_a_request_that_fails_is_in_the_table_of_errors(paced: tuple[PacedNode, RunningServer], tmp_path: Path) -> None:
    node, server = paced
    answer = node.script

    def script(_: FakeNode, generate: Generate) -> None:
        (fails("internal") if len(node.generates) % 3 == 0 else answer)(node, generate)

    node.script = script
    output = run(server.url, *SMALL, "--concurrency", "1", "--num-requests", "6", "--json", str(tmp_path / "run"))
    summary, requests = requests_of(tmp_path / "run")
    assert [error["count"] for error in summary["errors"]] == [2]
    assert summary["errors"][0]["kind"].startswith(("http_5", "stream_error"))
    assert (summary["completed"], summary["failed"]) == (4, 2)
    assert [request["error_kind"] is None for request in requests] == [True, False, True, True, False, True]
    assert summary["errors"][0]["kind"] in output


def test_ctrl_c_ends_with_the_summary_so_far(paced: tuple[PacedNode, RunningServer], tmp_path: Path) -> None:
    node, server = paced
    node.script = lambda fake, generate: node._start(fake, generate) if len(node.generates) <= 4 else None
    command = start(server.url, *SMALL, "--concurrency", "2", "--duration", "600", "--json", str(tmp_path / "run"))
    try:
        wait_for(lambda: len(node.generates) == 6, TIMEOUT)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(TIMEOUT) == 0, command.output
    finally:
        command.close()
    assert "3 completed, 0 failed, 2 cut off" in command.output
    summary, _ = requests_of(tmp_path / "run")
    assert summary["interrupted"]
    wait_for(lambda: len(node.cancelled) == 2)  # the server was told, too


def test_a_server_that_cannot_be_tested_and_a_flag_that_is_wrong(paced: tuple[PacedNode, RunningServer]) -> None:
    node, server = paced
    node.script = fails("internal")
    assert "warm-up failed" in run(server.url, *SMALL, status=1)
    assert "--rate excludes --concurrency" in run(server.url, "--rate", "1", "--concurrency", "1", status=2)
    assert "v1/models" in run(server.url + "/nowhere", status=1)


def test_conversations_against_a_ring_and_two_saved_runs_compared(tiny_ring: UpRing, tmp_path: Path) -> None:
    """With a template and a tokenizer that the client knows nothing of, prompts have about the length asked for."""
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    chat = ("--endpoint", "chat", "--input-tokens", "60", "--output-tokens", "8", "--num-requests", "6")
    run(tiny_ring.url, *chat, "--timings", "--json", first, "--label", "one")
    turns = ("--workload", "multi-turn", "--turns", "3", "--system-tokens", "40", "--endpoint", "chat")
    run(
        tiny_ring.url,
        *turns,
        *("--input-tokens", "10", "--output-tokens", "4", "--num-requests", "4"),
        "--json",
        second,
    )
    chats, _ = requests_of(Path(first))
    assert chats["completed"] == 6
    assert chats["usage"]["prompt_tokens"] == pytest.approx(360, rel=0.25)
    assert chats["usage"]["completion_tokens"] == 48
    conversations, requests = requests_of(Path(second))
    assert conversations["completed"] == 12
    later = [request for request in requests if request["turn"] > 0]
    assert all(request["cached_tokens"] >= 40 for request in later)
    tiny_ring.wait_until_quiescent()

    command = start_command("loadtest", "compare", first, second, "--html", str(tmp_path / "report.html"))
    assert command.wait(TIMEOUT) == 0, command.output
    command.close()
    assert "output_throughput" in command.output
    assert "against one" in command.output
    assert (tmp_path / "report.html").exists()
