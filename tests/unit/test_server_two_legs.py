"""`kv_transfer_params` over HTTP: types, what reaches the node, what comes back, and that no refusal leaves KV held."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import pytest

from connector.kv_transfer_params import KVTransferParams
from connector.zmq_link import ZmqLinks
from engine.errors import ErrorKind
from server.protocol import KVTransferBody
from tests.server_rig import (
    MAX_MODEL_LEN,
    FakeNode,
    RunningServer,
    answers,
    events_of,
    fails,
    running_server,
    wait_for,
    write_model_directory,
)

LONG = "word " * (MAX_MODEL_LEN + 1)
PATHS = ("/v1/completions", "/v1/chat/completions")
WIRE_FIELDS = set(KVTransferParams.__struct_fields__)
LEASES = (f"lease-{number}" for number in count())


@dataclass(slots=True)
class Ring:
    """A decode node that answers, a prefill node that holds KV, a server in front."""

    decode: FakeNode
    prefill: FakeNode
    server: RunningServer

    def post(self, path: str, **body: Any) -> httpx.Response:
        content = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
        return self.server.client.post(path, json=content | body)

    def sent(self) -> KVTransferParams | None:
        """What the one request sent since the last call had with it."""
        (generate,) = self.decode.generates
        self.decode.generates.clear()
        return generate.kv_transfer_params


def held(**changes: Any) -> dict[str, Any]:
    """What a prefill node's response says, for one more lease."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0@e0",
        "remote_request_id": next(LEASES),
        "remote_block_ids": [[1, 2]],
        "remote_host": "203.0.113.1",
        "remote_port": 5600,
        "remote_num_tokens": 8,
        "remote_blocks_expiry_time": 1.5,
    } | changes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    decode, prefill = FakeNode(), FakeNode("prefill", "p0")
    decode.ready_peers = ["p0"]
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server(directory, [decode.address], [prefill.address]) as server:
        server.wait_ready()
        yield Ring(decode, prefill, server)
    decode.close()
    prefill.close()


@pytest.fixture
def ring(shared: Ring) -> Ring:
    for node in (shared.decode, shared.prefill):
        node.generates.clear()
        node.cancelled.clear()
        node.released.clear()
    shared.decode.script = answers([65])
    return shared


def error_of(reply: httpx.Response) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["param"]


# -- what reaches the node


def test_the_body_takes_exactly_what_the_link_carries() -> None:
    assert KVTransferBody.model_fields.keys() - {"prompt_token_ids"} == WIRE_FIELDS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_leg_reaches_the_node_as_it_came(ring: Ring, path: str, stream: bool) -> None:
    params = held()
    assert ring.post(path, stream=stream, kv_transfer_params=params).status_code == 200
    assert ring.sent() == KVTransferParams(**params)
    assert ring.prefill.released == ring.decode.released == []


def test_a_decode_leg_takes_no_place_at_the_prefill_node_but_may_fall_back_on_it(ring: Ring) -> None:
    expected = []

    def script(node: FakeNode, generate: Any) -> None:
        expected.append((ring.server.service.fleet._prefill[0].num_expected, generate.prefill_nodes))
        answers([65])(node, generate)

    ring.decode.script = script
    ring.post(PATHS[0], kv_transfer_params=held())
    ring.post(PATHS[0])
    assert expected == [(0, ["p0"]), (1, ["p0"])]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": None, "do_remote_decode": None},
        {"do_remote_prefill": False, "do_remote_decode": False, "remote_engine_id": "p0@e0", "prompt_token_ids": [5]},
    ],
)
def test_params_that_ask_for_nothing_are_as_good_as_none(ring: Ring, path: str, params: Any) -> None:
    reply = ring.post(path, n=2, kv_transfer_params=params)
    assert reply.status_code == 200
    assert "kv_transfer_params" not in reply.json()
    assert [generate.kv_transfer_params for generate in ring.decode.generates] == [None, None]


@pytest.mark.parametrize("path", PATHS)
def test_unknown_keys_and_explicit_nulls(ring: Ring, path: str) -> None:
    placeholders = dict.fromkeys([*WIRE_FIELDS, "prompt_token_ids"]) | {"do_remote_decode": True}
    foreign = {"dcp_size": "many", "remote_bootstrap_addr": {"a": 1}, "transfer_id": 7}
    assert ring.post(path, kv_transfer_params=placeholders | foreign).status_code == 200
    assert ring.sent() == KVTransferParams(do_remote_decode=True)


def test_the_largest_values_pass_the_link(ring: Ring) -> None:
    most = 2**53
    params = held(remote_num_tokens=most, remote_port=65535, tp_size=most, remote_block_ids=[0, most])
    params |= {"remote_host": "\u00e9" * 65536, "remote_blocks_expiry_time": 2}
    assert ring.post(PATHS[0], kv_transfer_params=params).status_code == 200
    assert ring.sent() == KVTransferParams(**params)


WRONG = {
    "do_remote_prefill": ["true", 1],
    "do_remote_decode": ["true", 0],
    "remote_engine_id": [7, [], "\ud800", "x" * 65537],
    "remote_request_id": [7],
    "remote_block_ids": ["1", [-1], [True], [[1.5]], [[1], "2"], [[[1]]], {}, [2**53 + 1]],
    "remote_host": [7],
    "remote_port": ["5600", -1, 65536, 1.5, True],
    "remote_num_tokens": ["8", -1, 2**53 + 1],
    "remote_prefill_cached_tokens": [False],
    "remote_blocks_expiry_time": ["soon", True, float("nan"), float("inf")],
    "tp_size": ["1"],
    "transfer_mode": [1],
    "protocol_version": ["1"],
    "prompt_token_ids": ["Hi", [], ["a"], [1.0], [True], [-1], [[1]], 5],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_type_is_refused_by_name(ring: Ring, path: str, field: str, value: Any) -> None:
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "kv_transfer_params": {field: value}}
    headers = {"content-type": "application/json"}
    reply = ring.server.client.post(path, content=json.dumps(body), headers=headers)
    assert error_of(reply) == (400, f"kv_transfer_params.{field}")
    assert ring.decode.generates == []


def test_params_must_be_an_object(ring: Ring) -> None:
    for value in ("x", [], True):
        assert error_of(ring.post(PATHS[0], kv_transfer_params=value)) == (400, "kv_transfer_params")


def test_the_schema_shows_the_fields(ring: Ring) -> None:
    schemas = ring.server.client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["KVTransferBody"]["properties"]
    assert fields.keys() == WIRE_FIELDS | {"prompt_token_ids"}
    list_of_ints = {"items": {"type": "integer"}, "type": "array"}
    assert fields["remote_block_ids"]["anyOf"][:2] == [list_of_ints, {"items": list_of_ints, "type": "array"}]
    assert fields["prompt_token_ids"]["anyOf"][0] == list_of_ints
    for name in ("CompletionBody", "ChatBody"):
        used = schemas[name]["properties"]["kv_transfer_params"]["anyOf"]
        assert {"$ref": "#/components/schemas/KVTransferBody"} in used


# -- a prompt that the other leg has tokenized


def test_a_chat_takes_the_other_legs_token_ids(ring: Ring) -> None:
    ids = [7, 8, 9]
    # Not what the template could render: it is not asked.
    messages = [{"role": "user", "content": None}]
    reply = ring.post(PATHS[1], messages=messages, kv_transfer_params=held(prompt_token_ids=ids), return_token_ids=True)
    assert reply.status_code == 200
    assert reply.json()["prompt_token_ids"] == ids
    assert reply.json()["usage"]["prompt_tokens"] == 3
    assert list(ring.decode.generates[0].prompt_token_ids) == ids


def test_a_completion_has_its_own_prompt(ring: Ring) -> None:
    ring.post(PATHS[0], kv_transfer_params=held(prompt_token_ids=[7, 8, 9]))
    assert list(ring.decode.generates[0].prompt_token_ids) == ring.server.encode("Hi")


# -- what the client gets back


HANDED_OUT = KVTransferParams(
    do_remote_prefill=True,
    do_remote_decode=False,
    remote_engine_id="d0@e0",
    remote_request_id="lease",
    remote_block_ids=[[3, 4]],
    remote_host="127.0.0.1",
    remote_port=0,
    remote_num_tokens=8,
    remote_blocks_expiry_time=12.5,
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("also_prefill", [False, True])
def test_the_response_says_where_the_kv_is_held(ring: Ring, path: str, also_prefill: bool) -> None:
    ring.decode.script = answers([65, 66], kv_transfer_params=HANDED_OUT)
    asked = held(do_remote_decode=True) if also_prefill else {"do_remote_decode": True}
    body = ring.post(path, kv_transfer_params=asked).json()
    assert body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "d0@e0",
        "remote_request_id": "lease",
        "remote_block_ids": [[3, 4]],
        "remote_host": "127.0.0.1",
        "remote_port": 0,
        "remote_num_tokens": 8,
        "remote_blocks_expiry_time": 12.5,
    }
    assert "kv_transfer_params" not in body["choices"][0]
    assert ring.sent() == KVTransferParams(**asked)
    assert ring.decode.released == ring.prefill.released == []


@pytest.mark.parametrize("path", PATHS)
def test_without_anything_held_the_key_is_left_out(ring: Ring, path: str) -> None:
    body = ring.post(path, kv_transfer_params={"do_remote_decode": True}).json()
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize("path", PATHS)
def test_chunks_never_carry_params(ring: Ring, path: str) -> None:
    ring.decode.script = answers([65, 66], kv_transfer_params=HANDED_OUT)
    options = {"include_usage": True}
    events = events_of(ring.post(path, stream=True, stream_options=options, kv_transfer_params=held()))
    assert events
    assert not any("kv_transfer_params" in event for event in events)


# -- what one leg cannot be


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("changes", [{"stream": True}, {"n": 2}])
def test_kv_is_held_for_one_whole_answer_only(ring: Ring, path: str, changes: dict[str, Any]) -> None:
    reply = ring.post(path, kv_transfer_params={"do_remote_decode": True}, **changes)
    assert error_of(reply) == (400, "kv_transfer_params.do_remote_decode")
    assert ring.decode.generates == []
    assert ring.prefill.released == ring.decode.released == []


@pytest.mark.parametrize("field", ["do_remote_decode", "do_remote_prefill"])
@pytest.mark.parametrize("prompt", [["Hi", "Ho"], [[1], [2]]])
def test_a_batch_is_no_leg(ring: Ring, field: str, prompt: Any) -> None:
    reply = ring.post(PATHS[0], prompt=prompt, kv_transfer_params={field: True})
    assert error_of(reply) == (400, f"kv_transfer_params.{field}")
    assert ring.post(PATHS[0], prompt=prompt[:1], kv_transfer_params={field: True}).status_code == 200


# -- a refused decode leg gives the KV back


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
    "echo with logprobs": (PATHS[:1], {"echo": True, "logprobs": 1}, 400),
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
