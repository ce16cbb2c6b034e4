"""Nodes that die, fall silent, restart, disagree or fail a request; clients that leave. Each request ends once."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector.server_messages import NodeLoad
from engine.errors import ErrorKind
from server.http_settings import LimitsConfig
from tests.server_rig import (
    FakeNode,
    RunningServer,
    answers,
    events_of,
    fails,
    make_identity,
    running_server,
    wait_for,
    write_model_directory,
)

Serve = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture
def nodes() -> Iterator[Callable[..., FakeNode]]:
    made: list[FakeNode] = []

    def make(*args: Any, **kwargs: Any) -> FakeNode:
        made.append(FakeNode(*args, **kwargs))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    directory = write_model_directory(tmp_path)

    @contextmanager
    def serve_with(decode: list[FakeNode], prefill: list[FakeNode] | None = None, **kw: Any) -> Iterator[RunningServer]:
        prefill_addresses = [node.address for node in prefill or []]
        with running_server(directory, [node.address for node in decode], prefill_addresses, **kw) as server:
            yield server
            # A gauge that is off by one means that some request ended twice or not at all.
            for name in ("running", "waiting"):
                labels = {"model_name": "tiny", "engine": "0"}
                wait_for(lambda: server.metric(f"vllm:num_requests_{name}", **labels) == 0)  # noqa: B023

    return serve_with


def starts_only(token_ids: list[int]) -> Any:
    """Sends these tokens and then nothing more."""

    def script(node: FakeNode, generate: Any) -> None:
        for token_id in token_ids:
            node.send_output(generate.request_id, [token_id])

    return script


def reason_of(server: RunningServer) -> str:
    reply = server.client.get("/ready")
    assert reply.status_code == 503
    assert "retry-after" in reply.headers
    reason: str = reply.json()["reason"]
    return reason


# -- errors of one request


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.INVALID_REQUEST, 400),
        (ErrorKind.OVERLOADED, 429),
        (ErrorKind.INTERNAL, 500),
        (ErrorKind.KV_LOAD_FAILED, 500),
        (ErrorKind.PEER_UNREACHABLE, 502),
        (ErrorKind.NO_NODE_READY, 503),
        (ErrorKind.DEADLINE_EXCEEDED, 504),
    ],
)
def test_an_error_before_the_first_token_has_its_status(nodes: Any, serve: Serve, kind: ErrorKind, status: int) -> None:
    node = nodes()
    node.script = fails(kind, "the story")
    with serve([node]) as server:
        server.wait_ready()
        for stream in (False, True):
            reply = server.chat(stream=stream)
            assert reply.status_code == status
            error = reply.json()["error"]
            assert (error["code"], error["message"]) == (status, "the story")
            assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_a_field_that_only_the_node_could_refuse_is_named(nodes: Any, serve: Serve) -> None:
    node = nodes()

    def script(node: FakeNode, generate: Any) -> None:
        if generate.sampling.seed:
            node.send_output(generate.request_id, [65])
        fault = {"error_kind": ErrorKind.INVALID_REQUEST, "error": "too long", "error_param": "prompt"}
        node.send_output(generate.request_id, finish_reason="error", **fault)

    node.script = script
    expected = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}
    with serve([node]) as server:
        server.wait_ready()
        for stream in (False, True):
            reply = server.chat(stream=stream, seed=0)
            assert (reply.status_code, reply.json()["error"]) == (400, expected)
        assert events_of(server.complete(stream=True, seed=1))[-1]["error"] == expected


def test_an_error_in_mid_stream_is_an_event_before_done(nodes: Any, serve: Serve) -> None:
    node = nodes()

    def script(node: FakeNode, generate: Any) -> None:
        node.send_output(generate.request_id, [65])
        node.send_output(generate.request_id, finish_reason="error", error_kind=ErrorKind.INTERNAL, error="broke")

    node.script = script
    with serve([node]) as server:
        server.wait_ready()
        reply = server.complete(stream=True)
        assert reply.status_code == 200
        events = events_of(reply)
        assert events[0]["choices"][0]["text"] == server.decode([65])
        assert events[-1]["error"]["code"] == 500
        assert server.complete().status_code == 500


def test_one_failing_choice_ends_the_others(nodes: Any, serve: Serve) -> None:
    node = nodes()

    def script(node: FakeNode, generate: Any) -> None:
        if generate.sampling.seed == 2:
            node.send_output(generate.request_id, finish_reason="error", error_kind=ErrorKind.INTERNAL, error="x")

    node.script = script
    with serve([node]) as server:
        server.wait_ready()
        assert server.complete(n=3, seed=1).status_code == 500
        wait_for(lambda: len(node.cancelled) == 2)
        assert {g.request_id for g in node.generates if g.sampling.seed != 2} == set(node.cancelled)


def test_a_request_that_takes_too_long_is_given_up(nodes: Any, serve: Serve) -> None:
    node = nodes()
    with serve([node], limits=LimitsConfig(request_timeout=0.3)) as server:
        server.wait_ready()
        assert server.complete().status_code == 504
        node.script = starts_only([65])
        assert events_of(server.complete(stream=True))[-1]["error"]["code"] == 504
        wait_for(lambda: len(node.cancelled) == 2)


def test_what_the_node_aborts_by_itself_is_an_error_and_no_short_answer(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = answers([65], finish_reason="abort")
    with serve([node]) as server:
        server.wait_ready()
        response = server.complete()
        assert (response.status_code, "gave the request up" in response.text) == (502, True)
        assert server.complete(stream=True).status_code == 502


def test_nodes_that_serve_another_model_than_the_server_s_are_refused(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.identity = make_identity(config_digest="of another model")
    with serve([node]) as server:
        wait_for(lambda: "another model than the server's --model" in reason_of(server))
        assert server.complete().status_code == 503


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(nodes: Any, serve: Serve, monkeypatch: Any) -> None:
    node = nodes()
    with serve([node]) as server:
        server.wait_ready()

        def break_down(*args: object, **kwargs: object) -> None:
            raise OverflowError("cannot be sent")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.service.fleet), "submit", break_down)
            assert server.complete().status_code == 500
        assert not server.service._generations


def test_late_unknown_and_malformed_messages_are_counted_and_dropped(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = answers([65])
    with serve([node]) as server:
        server.wait_ready()
        node.send_raw(b"\xff\xfe not a message")
        node.send_raw(b"")
        node.send_output("never-heard-of", [65])
        assert server.complete().status_code == 200
        node.send_output(node.generates[0].request_id, [65], finish_reason="stop")
        wait_for(lambda: server.metric("pdserve_late_outputs_total") == 2)
        wait_for(lambda: server.metric("pdserve_malformed_messages_total") == 2)
        assert server.complete().status_code == 200


# -- clients that leave


@pytest.mark.parametrize("tokens_before", [0, 1])
def test_a_client_that_leaves_a_stream_cancels_at_the_node(nodes: Any, serve: Serve, tokens_before: int) -> None:
    node = nodes()
    node.script = starts_only([65] * tokens_before)
    with serve([node]) as server:
        server.wait_ready()
        body = {"prompt": "Hi", "stream": True, "n": 2}
        url = f"{server.url}/v1/completions"
        with pytest.raises(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.3) as reply:
            reply.read()
        wait_for(lambda: len(node.cancelled) == 2)


def test_a_client_that_leaves_before_the_answer_cancels_at_the_node(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = starts_only([65])
    with serve([node]) as server:
        server.wait_ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}, timeout=0.3)
        wait_for(lambda: len(node.cancelled) == 1)
        assert server.service._generations == set()


def test_a_client_that_does_not_read_holds_up_nobody(nodes: Any, serve: Serve) -> None:
    slow, fast = [65] * 5000, [66]
    node = nodes()
    node.max_model_len = 10_000

    def script(node: FakeNode, generate: Any) -> None:
        answers(slow if generate.sampling.max_tokens == len(slow) else fast)(node, generate)

    node.script = script
    with serve([node]) as server:
        server.wait_ready()
        body = {"prompt": "Hi", "stream": True, "max_tokens": len(slow)}
        with server.client.stream("POST", "/v1/completions", json=body) as reply:
            with httpx.Client(base_url=server.url, timeout=10) as other:
                for _ in range(5):
                    assert other.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
            reply.read()
        assert len("".join(e["choices"][0]["text"] for e in events_of(reply))) == len(slow)


# -- nodes that come and go


def test_without_a_node_requests_are_refused_with_the_reason(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.ready, node.reason = False, "loading weights"
    with serve([node]) as server:
        wait_for(lambda: "loading weights" in reason_of(server))
        reply = server.complete()
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        assert "loading weights" in reply.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
        node.ready = True
        node.script = answers([65])
        server.wait_ready()
        assert server.complete().status_code == 200


def test_the_death_of_a_node_fails_its_requests_at_once(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = starts_only([65])
    with serve([node], node_timeout=30) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        whole = pool.submit(server.complete)
        stream = pool.submit(server.chat, stream=True)
        wait_for(lambda: len(node.generates) == 2)
        node.close()
        assert whole.result(2).status_code == 502
        assert events_of(stream.result(2))[-1]["error"]["code"] == 502
        assert server.complete().status_code == 503
        assert "the connection was lost" in reason_of(server)


def test_a_restarted_node_is_used_again(nodes: Any, serve: Serve) -> None:
    node = nodes()
    with serve([node]) as server:
        server.wait_ready()
        node.close()
        wait_for(lambda: server.service.not_ready_reason is not None)
        again = nodes(address=node.address)
        again.epoch = "e1"
        again.script = answers([65])
        server.wait_ready()
        assert server.complete().status_code == 200


def test_a_new_epoch_fails_what_the_old_one_was_doing(nodes: Any, serve: Serve) -> None:
    node = nodes()
    with serve([node]) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        pending = pool.submit(server.complete)
        wait_for(lambda: node.generates)
        node.epoch = "e1"
        node.send(node.hello())
        reply = pending.result(2)
        assert reply.status_code == 502
        assert "restarted" in reply.json()["error"]["message"]
        server.wait_ready()


def test_a_silent_node_is_given_up_and_taken_back(nodes: Any, serve: Serve) -> None:
    node = nodes()
    with serve([node], node_timeout=0.3) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        pending = pool.submit(server.complete)
        wait_for(lambda: node.generates)
        node.silent = True
        reply = pending.result(3)
        assert reply.status_code == 502
        assert "silent for 0.3 s" in reply.json()["error"]["message"]
        node.silent = False
        server.wait_ready()
        # It may have gone on meanwhile: it is told to stop.
        wait_for(lambda: node.cancelled == [node.generates[0].request_id])
        node.script = answers([65])
        assert server.complete().status_code == 200


def test_a_node_that_says_goodbye_gets_nothing_new_but_may_finish(nodes: Any, serve: Serve) -> None:
    leaving, staying = nodes(name="d0"), nodes(name="d1")
    staying.load = NodeLoad(num_running=50)
    staying.script = answers([65])
    with serve([leaving, staying]) as server, ThreadPoolExecutor() as pool:
        wait_for(lambda: all(status.ready for status in server.service.fleet.statuses()))
        pending = pool.submit(server.complete)
        wait_for(lambda: leaving.generates)
        leaving.silent = True
        leaving.goodbye()
        wait_for(lambda: not server.service.fleet.statuses()[0].ready)
        assert "maintenance" in (server.service.fleet.statuses()[0].reason or "")
        assert [server.complete().status_code for _ in range(3)] == [200] * 3
        leaving.send_output(leaving.generates[0].request_id, [65], finish_reason="stop")
        assert pending.result(2).status_code == 200
        assert len(leaving.generates) == 1


def test_requests_spread_over_decode_nodes(nodes: Any, serve: Serve) -> None:
    both = [nodes(name="d0"), nodes(name="d1")]
    for node in both:
        node.script = answers([65])
    with serve(both) as server:
        wait_for(lambda: all(status.ready for status in server.service.fleet.statuses()))
        server.complete(n=10)
        assert [len(node.generates) for node in both] == [5, 5]


# -- prefill nodes and the whole ring


def test_readiness_needs_a_prefill_node_that_a_decode_node_knows(nodes: Any, serve: Serve) -> None:
    decode, prefill = nodes(), nodes("prefill", "p0")
    prefill.ready, prefill.reason = False, "loading weights"
    decode.script = answers([65])
    with serve([decode], [prefill]) as server:
        wait_for(lambda: "no prefill node is ready (p0: loading weights)" in reason_of(server))
        assert server.complete().status_code == 200
        assert decode.generates[0].prefill_nodes == []
        prefill.ready = True
        wait_for(lambda: "no decode node has met" in reason_of(server))
        decode.ready_peers = ["p0"]
        server.wait_ready()
        assert server.complete().status_code == 200
        assert decode.generates[1].prefill_nodes == ["p0"]
        assert server.client.get("/ready").json()["nodes"][1]["role"] == "prefill"


def test_prefill_nodes_take_turns_within_one_heartbeat(nodes: Any, serve: Serve) -> None:
    decode, prefill = nodes(), [nodes("prefill", f"p{i}") for i in range(3)]
    decode.ready_peers = ["p0", "p1", "p2"]
    with serve([decode], prefill, limits=LimitsConfig(request_timeout=0.3)) as server:
        wait_for(lambda: all(status.ready for status in server.service.fleet.statuses()))
        server.wait_ready()
        assert server.complete(n=6).status_code == 504
        firsts = [generate.prefill_nodes[0] for generate in decode.generates]
        assert sorted(firsts) == ["p0", "p0", "p1", "p1", "p2", "p2"]
        assert all(node.num_expected == 0 for node in server.service.fleet._prefill)


def test_a_node_with_another_model_is_refused_with_the_reason(nodes: Any, serve: Serve) -> None:
    decode, prefill = nodes(), nodes("prefill", "p0")
    prefill.identity = make_identity(weights_digest="other", block_size=8)
    decode.ready_peers = ["p0"]
    with serve([decode], [prefill]) as server:
        wait_for(lambda: "incompatible" in reason_of(server))
        reason = reason_of(server)
        assert "the weights differ" in reason
        assert "block_size" in reason


@pytest.mark.parametrize("case", ["role", "protocol", "name"])
def test_other_reasons_to_refuse_a_node(nodes: Any, serve: Serve, case: str) -> None:
    decode, prefill = nodes(), nodes("prefill", "p0")
    decode.ready_peers = ["p0"]
    if case == "role":
        prefill.role = "decode"
    elif case == "protocol":
        prefill.protocol_version = 99
    else:
        prefill.name = decode.name
    words = {"role": "given as --prefill", "protocol": "protocol version 99", "name": "called d0 too"}[case]
    with serve([decode], [prefill]) as server:
        wait_for(lambda: words in reason_of(server))


# -- shutting down


def test_draining_refuses_new_requests_and_ends_old_ones(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = starts_only([65])
    with serve([node], shutdown_timeout=0.5) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        stream = pool.submit(server.complete, stream=True)
        wait_for(lambda: node.generates)
        kept = httpx.Client(base_url=server.url, timeout=5)
        assert kept.get("/health").status_code == 200
        server.http.should_exit = True
        events = events_of(stream.result(5))
        assert events[-1]["error"]["code"] == 503
        kept.close()


def test_draining_lets_short_requests_finish(nodes: Any, serve: Serve) -> None:
    node = nodes()
    with serve([node], shutdown_timeout=5) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        pending = pool.submit(server.complete)
        wait_for(lambda: node.generates)
        server.http.should_exit = True
        wait_for(lambda: server.service.not_ready_reason == "shutting down")
        node.send_output(node.generates[0].request_id, [65], finish_reason="length")
        assert pending.result(5).status_code == 200


def test_many_requests_at_once_each_end_once(nodes: Any, serve: Serve) -> None:
    node = nodes()
    node.script = answers([65, 66, 67] * 5)
    with serve([node]) as server, ThreadPoolExecutor(16) as pool:
        server.wait_ready()
        replies = list(pool.map(lambda i: server.complete(stream=i % 2 == 0), range(64)))
        expected = server.decode([65, 66, 67] * 5)
        for i, reply in enumerate(replies):
            choices = [e["choices"][0] for e in events_of(reply)] if i % 2 == 0 else reply.json()["choices"]
            assert "".join(choice["text"] for choice in choices) == expected
        finished = {"model_name": "tiny", "engine": "0", "finished_reason": "length"}
        assert server.metric("vllm:request_success_total", **finished) == 64
    assert threading.active_count() < 20
