"""The server as a process: flags, exit codes, the announcement, signals."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from server.__main__ import main
from server.config import ServerConfig
from server.http_server import bind, url_of
from tests.server_rig import FakeNode, answers, events_of, wait_for, write_model_directory

DECODE = "tcp://127.0.0.1:1"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_model_directory(tmp_path)
    # The weights are never read, but a directory without any is no checkpoint.
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@contextmanager
def server_process(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, socket.socket]]:
    """A process, its URL and our end of its link to us; the test must have ended it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "server", "--model", str(directory), "--port", "0", "--parent-fd"]
    process = subprocess.Popen(
        [*command, str(theirs.fileno()), *flags], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
    )
    theirs.close()
    try:
        with ours, ours.makefile() as lines:
            announced = json.loads(lines.readline())
            assert announced["pid"] == process.pid
            yield process, announced["url"], ours
    finally:
        process.kill()
        process.communicate()


def test_a_process_announces_itself_serves_and_ends_cleanly_on_sigterm(directory: Path) -> None:
    node = FakeNode()
    node.script = answers([65])
    with server_process(directory, "--decode", node.address, "--shutdown-timeout", "0.3") as (process, url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 200
        node.script = lambda node, generate: node.send_output(generate.request_id, [65])
        with ThreadPoolExecutor() as pool:
            body = {"prompt": "Hi", "stream": True}
            stream = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=10)
            wait_for(lambda: len(node.generates) == 2)
            process.send_signal(signal.SIGTERM)
            assert events_of(stream.result())[-1]["error"]["code"] == 503
        assert process.wait(5) == 0
    node.close()


def test_a_process_in_front_of_one_node(directory: Path) -> None:
    node = FakeNode("prefill", "p0")
    node.script = answers([65])
    with server_process(directory, "--node", node.address) as (process, url, _):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    node.close()


def test_sigint_without_requests_ends_at_once(directory: Path) -> None:
    with server_process(directory, "--decode", DECODE) as (process, _, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 0


def test_a_server_ends_when_its_launcher_is_gone(directory: Path) -> None:
    with server_process(directory, "--decode", DECODE) as (process, _, parent):
        parent.shutdown(socket.SHUT_RDWR)
        assert process.wait(3) == 0


def test_the_server_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, server.__main__; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_port_in_use_is_named_before_anything_else_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", "no-such-model", "--decode", DECODE, "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--port: cannot listen on 127.0.0.1:{port}: Address already in use" in error


def test_two_servers_cannot_bind_one_port() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_an_ipv6_url_has_brackets() -> None:
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no-such-model", "--decode", DECODE], "--model"),
        (["--model", "x"], "--decode or --node must be given"),
        (["--model", "x", "--node", DECODE, "--decode", DECODE], "--node excludes --decode"),
        (["--model", "x", "--node", DECODE, "--prefill", DECODE], "--node excludes --decode and --prefill"),
        (["--model", "x", "--node", ""], "--node must look like"),
        (["--model", "x", "--node", "localhost:1"], "--node must look like"),
        (["--model", "x", "--decode", "localhost:1"], "--decode"),
        (["--model", "x", "--decode", DECODE, "--prefill", DECODE], "--prefill"),
        (["--model", "x", "--decode", DECODE, "--port", "70000"], "--port"),
        (["--model", "x", "--decode", DECODE, "--host", "no.such.host.invalid"], "--host"),
        (["--model", "x", "--decode", DECODE, "--node-timeout", "0.5"], "--node-timeout"),
        (["--model", "x", "--decode", DECODE, "--request-timeout", "0"], "--request-timeout"),
        (["--model", "", "--decode", DECODE], "--model"),
        (["--model", "x", "--decode", DECODE, "--parent-fd", "987"], "--parent-fd"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_the_flag(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = [] if "--port" in flags else ["--port", "0"]
    assert main([*flags, *ports]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("pdserve server: ")
    assert words in error


def test_a_checkpoint_without_a_tokenizer_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(directory), "--decode", DECODE, "--port", "0"]
    (directory / "tokenizer.json").write_text("{}")
    assert main(flags) == 2
    assert "cannot read" in capsys.readouterr().err
    (directory / "tokenizer.json").unlink()
    assert main(flags) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


def test_an_unknown_flag_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--model", "x", "--frobnicate", "1"])
    assert caught.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


def test_names_default_to_the_model() -> None:
    settings: dict[str, Any] = {"model": "m", "decode": (DECODE,)}
    assert ServerConfig(**settings).model_names == ("m",)
    assert ServerConfig(**settings, served_model_name=("a", "b")).model_names == ("a", "b")
