"""What clients may send and how much may be under way: refused early, in the usual shape, and nothing is left."""

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from connector.server_messages import NodeLoad
from engine.errors import ConfigError
from server.http_protocol import MAX_NUM_HEADERS
from server.http_settings import LimitsConfig
from tests.server_rig import (
    FakeNode,
    RunningServer,
    answers,
    events_of,
    running_server,
    wait_for,
    write_model_directory,
)


@pytest.fixture
def node() -> Iterator[FakeNode]:
    node = FakeNode()
    node.script = answers([65])
    yield node
    node.close()


@contextmanager
def serving(tmp_path: Path, node: FakeNode, **limits: Any) -> Iterator[RunningServer]:
    with running_server(write_model_directory(tmp_path), [node.address], limits=LimitsConfig(**limits)) as server:
        server.wait_ready()
        yield server


def say(server: RunningServer, *pieces: bytes) -> bytes:
    """All that the server answers to this until it closes the connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def error_in(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: mine" in head or b"\r\nx-request-id: " in head
    assert b"\r\nconnection: close" in head
    error = orjson.loads(body)["error"]
    assert str(error["code"]).encode() == head.split(b" ")[1]
    return error


# The head


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    node = FakeNode()
    node.script = answers([65])
    with serving(tmp_path_factory.mktemp("m"), node, max_header_bytes=2048, receive_timeout=0.3) as server:
        yield server
    node.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 2048 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Endless: " + b"x" * 4096,
        b"GET /health?" + b"x" * 2048 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 4096,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_NUM_HEADERS + 1) + b"\r\n",
    ],
    ids=["long", "endless", "url", "endless url", "many"],
)
def test_a_head_that_is_too_large(strict: RunningServer, head: bytes) -> None:
    assert error_in(say(strict, head))["code"] == 431


def test_the_header_limit_holds_for_each_request_alone(strict: RunningServer) -> None:
    for _ in range(3):
        assert strict.client.get("/health", headers={"X-Long": "x" * 1200}).status_code == 200
    big_body = {"prompt": "x" * 5000}
    assert strict.client.post("/v1/completions", json=big_body).status_code == 400
    assert strict.client.get("/health").status_code == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n"])
def test_what_is_no_http_request_gets_an_error_of_the_usual_shape(strict: RunningServer, garbage: bytes) -> None:
    assert error_in(say(strict, garbage))["code"] == 400


# The time that a request takes to arrive


@pytest.mark.parametrize(
    "piece",
    [
        b"GET /health HTT",
        b"GET /health HTTP/1.1\r\nX: y",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nX-Request-Id: mine\r\n"
        b'Content-Length: 1000\r\n\r\n{"pro',
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["line", "header", "body", "chunks"],
)
def test_a_request_that_does_not_arrive(strict: RunningServer, piece: bytes) -> None:
    answer = say(strict, piece)
    assert error_in(answer)["code"] == 408
    assert (b"x-request-id: mine" in answer) is (b"mine" in piece)
    wait_for(lambda: strict.service.admission.num_requests == 0)


def test_a_connection_on_which_nothing_comes_is_closed(strict: RunningServer) -> None:
    assert say(strict) == b""


def test_a_slow_answer_is_no_slow_request(strict: RunningServer, tmp_path: Path) -> None:
    """The time limit on arrival has long passed when the answer comes; the next request has its own."""
    node = FakeNode()
    may_answer = threading.Event()

    def script(node: FakeNode, generate: Any) -> None:
        may_answer.wait(5)
        answers([65])(node, generate)

    node.script = script
    with serving(tmp_path, node, receive_timeout=0.1) as server, ThreadPoolExecutor() as pool:
        reply = pool.submit(server.complete)
        wait_for(lambda: node.generates)
        assert not threading.Event().wait(0.3)
        may_answer.set()
        assert reply.result(5).status_code == 200
        assert server.client.get("/health").status_code == 200
    node.close()


def test_a_bad_head_behind_a_running_request_does_not_answer_for_it(strict: RunningServer, tmp_path: Path) -> None:
    node = FakeNode()
    with serving(tmp_path, node) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
        assert say(server, head + b'{"prompt":"Hi"}', b"BAD\x00") == b""
    node.close()


# Overload


def open_streams(server: RunningServer, pool: ThreadPoolExecutor, num_streams: int) -> Sequence[Any]:
    before = server.service.admission.num_in_flight
    streams = [pool.submit(server.complete, stream=True, max_tokens=2) for _ in range(num_streams)]
    wait_for(lambda: server.service.admission.num_sequences == before + num_streams)
    return streams


def assert_refused(server: RunningServer, reply: httpx.Response) -> None:
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "RateLimitError"
    assert reply.headers["x-request-id"]


def test_what_is_over_the_limit_is_refused_and_what_was_taken_in_is_finished(tmp_path: Path, node: FakeNode) -> None:
    node.script = lambda node, generate: None
    with serving(tmp_path, node, max_in_flight=3) as server, ThreadPoolExecutor() as pool:
        streams = open_streams(server, pool, 3)
        assert server.client.get("/load").json() == {"server_load": 3}
        assert_refused(server, server.complete())
        assert_refused(server, server.chat())
        assert_refused(server, server.client.post("/tokenize", json={"prompt": "Hi"}))
        assert server.client.get("/v1/models").status_code == 200
        assert server.metric("vllm:admission_rejections_total", model_name="tiny", engine="0") == 3
        assert len(node.generates) == 3
        for generate in list(node.generates):
            answers([65, 66])(node, generate)
        assert all(events_of(stream.result(5))[-1]["choices"][0]["finish_reason"] == "length" for stream in streams)
        node.script = answers([65])
        assert server.complete().status_code == 200
        assert server.client.get("/load").json() == {"server_load": 0}
        admission = server.service.admission
        assert (admission.num_requests, admission.num_submitted, admission.num_sequences) == (0, 0, 0)


def test_in_a_burst_each_is_answered_or_refused_and_nothing_is_left(tmp_path: Path, node: FakeNode) -> None:
    with serving(tmp_path, node, max_in_flight=3) as server, ThreadPoolExecutor(16) as pool:
        statuses = [reply.status_code for reply in pool.map(lambda _: server.complete(n=2), range(100))]
        assert set(statuses) <= {200, 429}
        assert len(node.generates) == 2 * statuses.count(200) > 0
        rejections = server.metric("vllm:admission_rejections_total", model_name="tiny", engine="0")
        assert rejections == statuses.count(429)
        wait_for(lambda: server.service.admission.num_in_flight == 0)


def test_refused_before_the_body_is_read(tmp_path: Path, node: FakeNode) -> None:
    node.script = lambda node, generate: None
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    with serving(tmp_path, node, max_in_flight=1) as server, ThreadPoolExecutor() as pool:
        (stream,) = open_streams(server, pool, 1)
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port), timeout=5) as connection:
            connection.sendall(head)
            assert connection.recv(64).startswith(b"HTTP/1.1 429 ")
        answers([65])(node, node.generates[0])
        assert stream.result(5).status_code == 200


def test_sequences_count_not_only_requests(tmp_path: Path, node: FakeNode) -> None:
    node.script = lambda node, generate: None
    with serving(tmp_path, node, max_in_flight=4) as server, ThreadPoolExecutor() as pool:
        streams = open_streams(server, pool, 1)
        assert_refused(server, server.complete(n=4))
        assert_refused(server, server.complete(prompt=["a", "b"], n=2))
        assert_refused(server, server.chat(n=4))
        assert len(node.generates) == 1
        fits = pool.submit(server.complete, n=3, max_tokens=1)
        wait_for(lambda: len(node.generates) == 4)
        for generate in list(node.generates):
            answers([65])(node, generate)
        assert [reply.result(5).status_code for reply in (*streams, fits)] == [200, 200]


def test_a_request_larger_than_the_limit_is_served_when_it_is_alone(tmp_path: Path, node: FakeNode) -> None:
    with serving(tmp_path, node, max_in_flight=2) as server:
        assert len(server.complete(n=5).json()["choices"]) == 5


def test_the_default_follows_what_the_nodes_run(tmp_path: Path, node: FakeNode) -> None:
    with serving(tmp_path, node) as server:
        assert server.service.fleet.capacity == 256
    node.max_num_seqs = 100
    with serving(tmp_path, node) as server:
        assert server.service.fleet.capacity == 400


def test_full_nodes_refuse_though_it_is_others_who_fill_them(tmp_path: Path, node: FakeNode) -> None:
    with serving(tmp_path, node) as server:
        node.load = NodeLoad(num_running=6, num_waiting=250)
        wait_for(lambda: server.service.fleet.is_full)
        assert_refused(server, server.complete())
        assert not node.generates
        node.load = NodeLoad(num_running=6, num_waiting=249)
        wait_for(lambda: not server.service.fleet.is_full)
        assert server.complete().status_code == 200


def test_a_node_that_is_not_ready_is_503_and_not_429(tmp_path: Path, node: FakeNode) -> None:
    with serving(tmp_path, node) as server:
        node.load = NodeLoad(num_waiting=1000)
        node.ready = False
        wait_for(lambda: server.service.not_ready_reason)
        reply = server.complete()
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"max_header_bytes": 10}, "--max-header-bytes"),
        ({"receive_timeout": 0}, "--receive-timeout"),
        ({"receive_timeout": float("nan")}, "--receive-timeout"),
        ({"keep_alive_timeout": -1}, "--keep-alive-timeout"),
    ],
)
def test_bad_limits_name_the_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        LimitsConfig(**settings)
