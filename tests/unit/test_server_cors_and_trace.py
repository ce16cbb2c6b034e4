"""Pages of other origins, and traces that pass through."""

from collections.abc import Iterator
from typing import Any

import pytest

from connector.codec import encode
from connector.server_messages import Generate, decode_from_server
from engine.errors import ConfigError, MalformedMessage
from engine.sampling_params import SamplingParams
from engine.trace import TraceContext
from server.http_settings import AccessConfig, CorsConfig
from server.trace import trace_of
from tests.server_rig import FakeNode, RunningServer, answers, running_server, write_model_directory

PAGE = "https://chat.example.org"
KEY = {"authorization": "Bearer k"}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    node.script = answers([65])
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    cors = CorsConfig(allowed_origins=(PAGE,), allowed_methods=("GET", "POST"))
    with running_server(directory, [node.address], cors=cors, access=AccessConfig(api_key=("k",))) as server:
        server.wait_ready()
        yield node, server
    node.close()


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer]) -> RunningServer:
    shared[0].generates.clear()
    return shared[1]


# Pages


def preflight(server: RunningServer, origin: str, method: str = "POST") -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    return server.client.options("/v1/chat/completions", headers=headers)


def test_a_preflight_needs_no_key(server: RunningServer) -> None:
    reply = preflight(server, PAGE)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(("origin", "method"), [("https://evil.example", "POST"), (PAGE, "DELETE")])
def test_others_are_not_let_in(server: RunningServer, origin: str, method: str) -> None:
    reply = preflight(server, origin, method)
    assert reply.status_code == 400
    assert reply.headers.get("access-control-allow-origin") in (None, PAGE)


@pytest.mark.parametrize(("headers", "status"), [(KEY, 200), ({}, 401)])
def test_a_page_can_read_answers_and_refusals(server: RunningServer, headers: dict[str, str], status: int) -> None:
    reply = server.client.post("/v1/completions", json={"prompt": "Hi"}, headers={"origin": PAGE, **headers})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


def test_without_the_flags_no_page_is_let_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), ["tcp://127.0.0.1:1"]) as server:
        assert preflight(server, PAGE).status_code == 405
        reply = server.client.get("/v1/models", headers={"origin": PAGE})
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"allowed_origins": ("chat.example.org",)}, "--allowed-origins"),
        ({"allowed_origins": (f"{PAGE}/page",)}, "--allowed-origins"),
        ({"allowed_methods": ("GET",)}, "--allowed-methods needs --allowed-origins"),
        ({"allow_credentials": True}, "--allow-credentials needs --allowed-origins"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "--allow-credentials"),
    ],
)
def test_bad_rules_name_the_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        CorsConfig(**settings)


# Traces


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_goes_to_the_node_and_back(
    shared: tuple[FakeNode, RunningServer], server: RunningServer, stream: bool
) -> None:
    headers = {**KEY, "traceparent": PARENT, "tracestate": "a=1,b=2"}
    reply = server.client.post("/v1/completions", json={"prompt": "Hi", "n": 2, "stream": stream}, headers=headers)
    assert reply.headers["traceparent"] == PARENT
    assert [generate.trace for generate in shared[0].generates] == [TraceContext(PARENT, "a=1,b=2")] * 2


def test_a_request_does_not_inherit_the_trace_of_the_one_before(
    shared: tuple[FakeNode, RunningServer], server: RunningServer
) -> None:
    for headers in ({"traceparent": PARENT}, {}, {"traceparent": "nonsense"}):
        reply = server.client.post("/v1/completions", json={"prompt": "Hi"}, headers={**KEY, **headers})
        assert reply.status_code == 200
    assert [generate.trace is None for generate in shared[0].generates] == [False, True, True]
    assert "traceparent" not in reply.headers


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-x",
        PARENT.upper(),
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        PARENT.replace("4b", "g0", 1),
        PARENT + "\n",
    ],
)
def test_a_malformed_trace_is_ignored(parent: str) -> None:
    if not parent.endswith("\n"):
        assert trace_of([(b"traceparent", parent.encode())]) is None
    with pytest.raises(ValueError, match="traceparent"):
        TraceContext(parent)


def test_what_is_valid() -> None:
    later = f"01{PARENT[2:]}-more"
    assert trace_of([(b"traceparent", later.encode())]) == TraceContext(later)
    assert trace_of([(b"traceparent", f" {PARENT} ".encode())]) == TraceContext(PARENT)
    assert TraceContext(PARENT).trace_id == TRACE_ID
    twice = [(b"traceparent", PARENT.encode())] * 2
    assert trace_of(twice) is None
    assert trace_of([(b"traceparent", b"\xff" * 55)]) is None


@pytest.mark.parametrize("state", [b"a=" + b"1" * 511, b"a=\xff", b"a=\x01"])
def test_a_bad_state_is_dropped_alone(state: bytes) -> None:
    assert trace_of([(b"traceparent", PARENT.encode()), (b"tracestate", state)]) == TraceContext(PARENT)


def test_states_of_several_headers_are_one_list() -> None:
    headers = [(b"traceparent", PARENT.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    assert trace_of(headers) == TraceContext(PARENT, "a=1,b=2")


def test_a_node_does_not_take_a_malformed_trace() -> None:
    message = Generate(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), trace=TraceContext(PARENT))
    assert decode_from_server.decode(encode(message)) == message
    with pytest.raises(MalformedMessage, match="traceparent"):
        decode_from_server.decode(encode(message).replace(PARENT.encode(), b"x" * len(PARENT)))
