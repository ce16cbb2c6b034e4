"""`kv_transfer_params` over HTTP: types, what reaches the node, what comes back."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from connector.kv_transfer_params import KVTransferParams
from server.protocol import KVTransferBody
from tests.leg_rig import HANDED_OUT, PATHS, Ring, error_of, held, running_ring
from tests.server_rig import FakeNode, answers, events_of

WIRE_FIELDS = set(KVTransferParams.__struct_fields__)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(tmp_path_factory.mktemp("model")) as ring:
        yield ring


@pytest.fixture
def ring(shared: Ring) -> Ring:
    return shared.reset()


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
