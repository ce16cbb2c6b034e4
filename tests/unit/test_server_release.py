"""KV held for a decode leg that no node will take, or for a client that is gone, is released and not left to expire."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from connector.kv_transfer_params import KVTransferParams
from connector.zmq_link import ZmqLinks
from engine.errors import ErrorKind
from tests.leg_rig import HANDED_OUT, PATHS, Ring, error_of, held, running_ring
from tests.server_rig import (
    MAX_MODEL_LEN,
    FakeNode,
    answers,
    fails,
    running_server,
    wait_for,
    write_model_directory,
)

LONG = "word " * (MAX_MODEL_LEN + 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(tmp_path_factory.mktemp("model")) as ring:
        yield ring


@pytest.fixture
def ring(shared: Ring) -> Ring:
    return shared.reset()


REFUSALS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "a field of the wrong type": (PATHS, {"temperature": "hot"}, 400),
    "a value out of range": (PATHS, {"temperature": -1}, 400),
    "no prompt": (PATHS[:1], {"prompt": []}, 400),
    "no messages": (PATHS[1:], {"messages": []}, 400),
    "an unsupported field": (PATHS, {"tools": [{"type": "function"}]}, 400),
    "an unknown model": (PATHS, {"model": "gpt-9"}, 404),
    "an over-long prompt": (PATHS[:1], {"prompt": LONG}, 400),
    "an over-long list of ids": (PATHS[:1], {"prompt": [65] * MAX_MODEL_LEN}, 400),
    "an over-long chat": (PATHS[1:], {"messages": [{"role": "user", "content": LONG}]}, 400),
    "no room for the output": (PATHS, {"max_tokens": MAX_MODEL_LEN}, 400),
    "a template that fails": (PATHS[1:], {"messages": [{"role": "user", "content": None}]}, 400),
    "a reserved template name": (PATHS[1:], {"chat_template_kwargs": {"messages": []}}, 400),
    "several choices": (PATHS, {"n": 2}, 400),
    "several prompts": (PATHS[:1], {"prompt": ["a", "b"]}, 400),
    "stream options without a stream": (PATHS, {"stream": False, "stream_options": {}}, 400),
    "several to choose from": (PATHS[:1], {"best_of": 2}, 400),
}


@pytest.mark.parametrize(
    ("path", "body", "status"), [(path, body, status) for paths, body, status in REFUSALS.values() for path in paths]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_releases(ring: Ring, path: str, body: dict[str, Any], status: int, stream: bool) -> None:
    params = held()
    assert ring.post(path, kv_transfer_params=params, **({"stream": stream} | body)).status_code == status
    wait_for(lambda: ring.prefill.released)
    assert ring.prefill.released == [KVTransferParams(**params)]
    assert ring.decode.generates == ring.decode.released == []


@pytest.mark.parametrize("changes", [{"do_remote_decode": True}, {"prompt_token_ids": [9999]}])
def test_a_refusal_of_the_leg_itself_releases(ring: Ring, changes: dict[str, Any]) -> None:
    params = held(**changes)
    (field,) = changes
    reply = ring.post(PATHS[1], stream=True, kv_transfer_params=params)
    assert error_of(reply) == (400, f"kv_transfer_params.{field}")
    wait_for(lambda: ring.prefill.released)
    assert ring.prefill.released[0].remote_request_id == params["remote_request_id"]


@pytest.mark.parametrize("engine_id", ["elsewhere@e0", "p0", "", None])
def test_kv_held_by_a_stranger_is_released_through_every_node(ring: Ring, engine_id: str | None) -> None:
    params = held(remote_engine_id=engine_id)
    before = ring.server.metric("pdserve_kv_releases_total")
    ring.post(PATHS[0], temperature=-1, kv_transfer_params=params)
    for node in (ring.decode, ring.prefill):
        wait_for(lambda: node.released == [KVTransferParams(**params)])  # noqa: B023
    assert ring.server.metric("pdserve_kv_releases_total") == before + 1


def test_refused_requests_that_fetch_nothing_release_nothing(ring: Ring) -> None:
    for params in ({"do_remote_decode": True}, held(do_remote_prefill=False), held(remote_port="x"), "x", None):
        for wrong in (-1, "hot"):
            assert ring.post(PATHS[0], temperature=wrong, kv_transfer_params=params).status_code == 400
    time.sleep(0.1)
    assert ring.prefill.released == ring.decode.released == []


def test_what_a_node_has_taken_is_the_nodes_to_release(ring: Ring) -> None:
    ring.decode.script = fails(ErrorKind.KV_LOAD_FAILED, "gone")
    assert ring.post(PATHS[0], kv_transfer_params=held()).status_code == 500
    ring.decode.script = lambda node, generate: None
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{ring.server.url}{PATHS[0]}", json={"prompt": "Hi", "kv_transfer_params": held()}, timeout=0.3)
    wait_for(lambda: len(ring.decode.cancelled) == 1)
    assert ring.prefill.released == ring.decode.released == []


def test_a_client_that_leaves_while_its_prompt_is_read(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        reading.set()
        go_on.wait(5)
        return [65]

    monkeypatch.setattr(ring.server.assets.tokenizer, "encode", encode)
    # Long enough to be tokenized off the event loop.
    body = {"prompt": "x" * 2100, "kv_transfer_params": held()}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{ring.server.url}{PATHS[0]}", json=body, timeout=0.3)
    assert reading.is_set()
    time.sleep(0.1)
    go_on.set()
    wait_for(lambda: ring.prefill.released)
    assert ring.decode.generates == []


def test_a_server_that_is_shutting_down_releases(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.server.service, "_is_draining", True)
    assert ring.post(PATHS[1], kv_transfer_params=held()).status_code == 503
    wait_for(lambda: ring.prefill.released)


def test_kv_held_for_a_request_that_was_given_up_is_released(ring: Ring) -> None:
    ring.decode.script = lambda node, generate: None
    body = {"prompt": "Hi", "kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{ring.server.url}{PATHS[0]}", json=body, timeout=0.3)
    wait_for(lambda: ring.decode.cancelled)
    # The node had finished before it heard of the cancellation.
    request_id = ring.decode.generates[0].request_id
    ring.decode.send_output(request_id, [65], finish_reason="length", kv_transfer_params=HANDED_OUT)
    wait_for(lambda: ring.decode.released == [HANDED_OUT])


def test_without_a_node_to_take_it(tmp_path: Any) -> None:
    decode, prefill = FakeNode(), FakeNode("prefill", "p0")
    decode.ready, decode.reason = False, "loading"
    try:
        with running_server(write_model_directory(tmp_path), [decode.address], [prefill.address]) as server:
            wait_for(lambda: all(node.reason in (None, "loading") for node in server.service.fleet.statuses()))
            params = held()
            reply = server.complete(kv_transfer_params=params)
            assert reply.status_code == 503
            assert "retry-after" in reply.headers
            wait_for(lambda: prefill.released == [KVTransferParams(**params)])
            # The holder itself is gone: whoever else is there may know it.
            prefill.close()
            wait_for(lambda: not server.service.fleet.statuses()[1].ready)
            assert server.complete(kv_transfer_params=params).status_code == 503
            wait_for(lambda: decode.released == [KVTransferParams(**params)])
    finally:
        decode.close()
        prefill.close()


def test_an_address_from_a_client_is_never_dialled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[str] = []
    dial = ZmqLinks.dial

    def spy(links: ZmqLinks, address: str, handler: Any) -> Any:
        dialled.append(address)
        return dial(links, address, handler)

    monkeypatch.setattr(ZmqLinks, "dial", spy)
    node = FakeNode()
    node.script = answers([65])
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        place = {"remote_host": "127.0.0.1", "remote_port": trap.getsockname()[1]}
        with running_server(write_model_directory(tmp_path), [node.address]) as server:
            server.wait_ready()
            for changes in (place, place | {"remote_engine_id": f"tcp://127.0.0.1:{place['remote_port']}"}):
                for stream in (False, True):
                    assert server.complete(stream=stream, kv_transfer_params=held(**changes)).status_code == 200
                assert server.complete(temperature=-1, kv_transfer_params=held(**changes)).status_code == 400
            wait_for(lambda: len(node.released) == 2)
            time.sleep(0.2)
            with pytest.raises(BlockingIOError):
                trap.accept()
        assert dialled == [node.address]
    node.close()
