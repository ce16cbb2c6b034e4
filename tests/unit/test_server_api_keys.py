"""API keys: who is let in, before anything is read, and that no key is ever shown."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.ring_plan import node_environment, server_config, server_environment
from deploy.up_config import UpConfig
from engine.errors import ConfigError
from engine.flags import parse_flags, to_flags
from server.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, read_api_keys
from server.gates import OPEN_PATHS
from server.http_settings import AccessConfig
from tests.server_rig import FakeNode, RunningServer, answers, running_server, write_model_directory

KEY, OTHER = "sk-secret-1", "sk-secret-2"
CLOSED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/load"),
    ("GET", "/no/such/path"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/health%2f..%2fv1/models"),
    ("OPTIONS", "/v1/completions"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    node = FakeNode()
    node.script = answers([65])
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server(directory, [node.address], access=AccessConfig(api_key=(KEY, OTHER))) as server:
        server.wait_ready()
        yield server
    node.close()


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_nothing_that_costs_work_is_open(server: RunningServer, method: str, path: str) -> None:
    before = server.metric("pdserve_unauthorized_requests_total")
    reply = server.client.request(method, path, headers={"X-Request-Id": "mine"})
    assert reply.status_code == 401
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", 401, None)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"] == "mine"
    assert server.metric("pdserve_unauthorized_requests_total") == before + 1


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_scrapers_and_documentation_need_no_key(server: RunningServer, path: str) -> None:
    assert server.client.get(path).status_code == 200


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {OTHER}", f"Bearer  {KEY}"])
def test_each_key_opens(server: RunningServer, authorization: str) -> None:
    headers = {"authorization": authorization}
    assert server.client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200
    assert server.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} {OTHER}"],
)
def test_nothing_else_does(server: RunningServer, authorization: str) -> None:
    assert server.client.get("/v1/models", headers={"authorization": authorization}).status_code == 401


def test_bytes_beyond_ascii_are_only_a_wrong_key(server: RunningServer) -> None:
    assert server.client.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_the_refusal_does_not_wait_for_the_body(server: RunningServer) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 401 ")


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfile-1\n\n  file-2  \n")
    path.chmod(0o600)
    keys = read_api_keys(AccessConfig(api_key=("flag",), api_key_file=path), "env-1 env-2\n")
    assert len(keys) == 5
    for key in ("flag", "file-1", "file-2", "env-1", "env-2"):
        assert keys.accept(f"Bearer {key}".encode())
    assert not keys.accept(b"Bearer # of the team")


def test_no_key_means_open_and_an_empty_environment_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert not read_api_keys(AccessConfig(), " ")
    assert not ApiKeys()


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_told(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        read_api_keys(AccessConfig(api_key_file=path))
    assert bool(caplog.records) is warns
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("config", "environment", "words"),
    [
        ({"api_key": ("",)}, "", "--api-key:"),
        ({"api_key": (f"{KEY} x",)}, "", "--api-key:"),
        ({"api_key": ("sk-ü",)}, "", "--api-key:"),
        ({"api_key": ("x" * 2000,)}, "", "--api-key:"),
        ({}, "sk-ü", ENVIRONMENT_VARIABLE),
        ({"api_key_file": "missing"}, "", "--api-key-file: cannot read"),
        ({"api_key_file": "empty"}, "", "holds no key"),
        ({"api_key_file": "binary"}, "", "--api-key-file: cannot read"),
        ({"api_key_file": "spaces"}, "", "--api-key-file:"),
    ],
)
def test_a_key_that_is_none_stops_the_start(
    tmp_path: Path, config: dict[str, Any], environment: str, words: str
) -> None:
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "spaces").write_text(f"{KEY} {OTHER}")
    if "api_key_file" in config:
        config = {"api_key_file": tmp_path / config["api_key_file"]}
    with pytest.raises(ConfigError, match=words) as caught:
        read_api_keys(AccessConfig(**config), environment)
    assert KEY not in str(caught.value)


def test_a_key_is_in_no_repr_and_no_argv() -> None:
    config = UpConfig(access=AccessConfig(api_key=(KEY,), api_key_file=Path("keys")))
    server = server_config(config, prefill=[], decode=["tcp://d:1"])
    assert KEY not in repr(config)
    assert KEY not in " ".join(to_flags(config)) + " ".join(to_flags(server))
    assert parse_flags(type(server), to_flags(server), "test").access.api_key_file == Path("keys")


def test_only_the_server_among_the_children_is_given_keys() -> None:
    config = UpConfig(access=AccessConfig(api_key=(KEY,)))
    inherited = {ENVIRONMENT_VARIABLE: OTHER, "HOME": "h"}
    assert server_environment(config, inherited) == {"HOME": "h", ENVIRONMENT_VARIABLE: f"{OTHER} {KEY}"}
    assert node_environment(inherited) == {"HOME": "h"}
    assert server_environment(UpConfig(), {"HOME": "h"}) == {"HOME": "h"}
