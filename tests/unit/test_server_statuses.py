"""Each cause of an error and its status, as clients see it; every answer keeps what /openapi.json promises."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ErrorKind
from server.http_errors import CLIENT_CLOSED_REQUEST
from server.http_settings import AccessConfig, CorsConfig, LimitsConfig
from tests.published_schema import PublishedSchema
from tests.server_rig import (
    MAX_MODEL_LEN,
    FakeNode,
    RunningServer,
    fails,
    running_server,
    wait_for,
    write_model_directory,
)

PATHS = ["/v1/completions", "/v1/chat/completions"]
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    node = FakeNode()
    yield node
    node.close()


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[tuple[FakeNode, RunningServer]]:
    """With default settings."""
    node = FakeNode()
    with ready(directory, node) as server:
        yield node, server
    node.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@contextmanager
def ready(directory: Path, node: FakeNode, **settings: Any) -> Iterator[RunningServer]:
    with running_server(directory, [node.address], **settings) as server:
        server.wait_ready()
        yield server


def ask(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    prompt = {"prompt": "Hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hi"}]}
    return server.client.post(path, json={**prompt, **body}, headers={"X-Request-Id": "mine"})


_schemas: dict[str, PublishedSchema] = {}


def schema_of(server: RunningServer) -> PublishedSchema:
    if server.url not in _schemas:
        _schemas[server.url] = PublishedSchema(server)
    return _schemas[server.url]


def check(server: RunningServer, reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status
    assert reply.headers["x-request-id"] == "mine"
    assert ("retry-after" in reply.headers) is (status in (429, 503))
    schema_of(server).check(reply)
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == (TYPES[status], status)
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.INVALID_REQUEST, 400),
        (ErrorKind.OVERLOADED, 429),
        (ErrorKind.KV_LOAD_FAILED, 500),
        (ErrorKind.INTERNAL, 500),
        (ErrorKind.PEER_UNREACHABLE, 502),
        (ErrorKind.NO_NODE_READY, 503),
        (ErrorKind.DEADLINE_EXCEEDED, 504),
    ],
)
def test_what_a_node_says(
    shared: tuple[FakeNode, RunningServer], kind: ErrorKind, status: int, path: str, stream: bool
) -> None:
    node, server = shared
    node.script = fails(kind, "the story")
    assert check(server, ask(server, path, stream=stream), status)["message"] == "the story"


@pytest.mark.parametrize("path", PATHS)
def test_bad_json_bad_field_and_an_overlong_prompt_are_400(shared: tuple[FakeNode, RunningServer], path: str) -> None:
    node, server = shared
    node.generates.clear()
    headers = {"content-type": "application/json", "x-request-id": "mine"}
    text = "word " * (MAX_MODEL_LEN + 1)
    overlong: dict[str, Any] = (
        {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    )
    assert check(server, server.client.post(path, content=b"{", headers=headers), 400)["param"] is None
    assert check(server, ask(server, path, temperature="hot"), 400)["param"] == "temperature"
    assert str(MAX_MODEL_LEN) in check(server, ask(server, path, **overlong), 400)["message"]
    assert not node.generates


@pytest.mark.parametrize("authorization", [{}, {"Authorization": "Bearer wrong"}])
@pytest.mark.parametrize("path", PATHS)
def test_a_missing_or_wrong_key_is_401(
    directory: Path, node: FakeNode, path: str, authorization: dict[str, str]
) -> None:
    with ready(directory, node, access=AccessConfig(api_key=("right",))) as server:
        server.client.headers.update(authorization)
        check(server, ask(server, path), 401)


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_404_with_a_body(shared: tuple[FakeNode, RunningServer], path: str) -> None:
    assert check(shared[1], ask(shared[1], path, model="gpt-9"), 404)["param"] == "model"


@pytest.mark.parametrize("path", PATHS)
def test_too_long_a_body_is_413_and_another_type_415(directory: Path, node: FakeNode, path: str) -> None:
    with ready(directory, node, limits=LimitsConfig(max_body_bytes=1000)) as server:
        check(server, ask(server, path, user="x" * 1000), 413)
        check(server, server.client.post(path, content=b"{}", headers={"x-request-id": "mine"}), 415)


@pytest.mark.parametrize("path", PATHS)
def test_saturated_is_429_before_any_work(directory: Path, node: FakeNode, path: str) -> None:
    with ready(directory, node, limits=LimitsConfig(max_in_flight=1)) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, path)
        wait_for(lambda: node.generates)
        check(server, ask(server, path), 429)
        assert len(node.generates) == 1
        node.send_output(node.generates[0].request_id, [65], finish_reason="length")
        assert first.result(5).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_decode_node_that_is_lost_is_502(directory: Path, node: FakeNode, path: str) -> None:
    with ready(directory, node) as server, ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, path)
        wait_for(lambda: node.generates)
        node.close()
        check(server, reply.result(5), 502)


@pytest.mark.parametrize("path", PATHS)
def test_no_node_is_503(directory: Path, path: str) -> None:
    with running_server(directory, ["tcp://127.0.0.1:1"]) as server:
        check(server, ask(server, path), 503)


@pytest.mark.parametrize("path", PATHS)
def test_draining_is_503(directory: Path, node: FakeNode, path: str) -> None:
    with ExitStack() as stack, ready(directory, node, shutdown_timeout=2) as server, ThreadPoolExecutor() as pool:
        # This connection is open already: the listener closes at once.
        schema = PublishedSchema(server)
        running = pool.submit(ask, server, path)
        wait_for(lambda: node.generates)
        other = stack.enter_context(httpx.Client(base_url=server.url))
        assert other.get("/ready").status_code == 200
        server.http.stop()
        wait_for(lambda: server.service.not_ready_reason == "shutting down")
        reply = other.post(path, json={"prompt": "x", "messages": [{"role": "user", "content": "x"}]})
        assert reply.status_code == 503
        schema.check(reply)
        assert "shutting down" in reply.json()["error"]["message"]
        node.send_output(node.generates[0].request_id, [65], finish_reason="length")
        assert running.result(5).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_is_504_and_cancels(directory: Path, node: FakeNode, path: str) -> None:
    with ready(directory, node, limits=LimitsConfig(request_timeout=0.2)) as server:
        check(server, ask(server, path), 504)
        wait_for(lambda: node.cancelled == [node.generates[0].request_id])


def test_a_client_that_left_is_499_in_the_log_only(
    directory: Path, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"prompt": "Hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: gone\r\nContent-Type: application/json\r\n"
    with ready(directory, node) as server, caplog.at_level("INFO"):
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: node.generates)
        wait_for(lambda: f"request gone: {CLIENT_CLOSED_REQUEST}" in caplog.text)
        wait_for(lambda: node.cancelled)


def test_a_bug_is_500_with_all_headers(directory: Path, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    cors = CorsConfig(allowed_origins=("https://page.example",))
    with ready(directory, node, cors=cors) as server:

        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(server.service, "start", broken)
        server.client.headers["origin"] = "https://page.example"
        reply = ask(server, PATHS[0])
        check(server, reply, 500)
        assert reply.json()["error"]["message"] == "internal error"
        assert reply.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/audio/speech", "audio"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/images/generations", "images"),
        ("/v1/moderations", "moderations"),
        ("/v1/files", "files"),
        ("/v1/batches/b1/cancel", "batches"),
        ("/v1/rerank", "reranking"),
        ("/v1/imagesque", "there is no /v1/imagesque"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_served_is_404_with_words(
    shared: tuple[FakeNode, RunningServer], path: str, words: str, method: str
) -> None:
    reply = shared[1].client.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
    assert words in error["message"]
    assert reply.headers["x-request-id"]
