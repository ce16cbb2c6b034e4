"""`pdserve server --node`: one node of either role behind HTTP, and a router that drives two of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from connector.kv_transfer_params import KVTransferParams
from connector.server_messages import Role
from tests.server_rig import (
    FakeNode,
    RunningServer,
    answers,
    events_of,
    running_server,
    wait_for,
    write_model_directory,
)
from tests.two_leg_router import ASK_TO_HOLD, TwoLegRouter

Front = Callable[[FakeNode], AbstractContextManager[RunningServer]]
HELD = KVTransferParams(
    do_remote_prefill=True,
    do_remote_decode=False,
    remote_engine_id="p0@e0",
    remote_request_id="lease",
    remote_block_ids=[[1]],
    remote_host="127.0.0.1",
    remote_port=1,
)


@pytest.fixture
def front(tmp_path: Path) -> Front:
    directory = write_model_directory(tmp_path)

    @contextmanager
    def start(node: FakeNode) -> Iterator[RunningServer]:
        with running_server(directory, [], node=node.address) as server:
            yield server

    return start


@pytest.fixture
def prefill() -> Iterator[FakeNode]:
    node = FakeNode("prefill", "p0")
    node.script = answers([65], kv_transfer_params=HELD)
    yield node
    node.close()


@pytest.fixture
def decode() -> Iterator[FakeNode]:
    node = FakeNode("decode", "d0")
    node.script = answers([65, 66, 67])
    yield node
    node.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_of_either_role_is_served(front: Front, role: Role) -> None:
    node = FakeNode(role, "n0")
    node.script = answers([65])
    node.ready, node.reason = False, "loading the model"
    with front(node) as server:
        wait_for(lambda: server.service.not_ready_reason == "the node is not ready (n0: loading the model)")
        assert server.client.get("/ready").status_code == 503
        assert server.complete().status_code == 503
        node.ready = True
        server.wait_ready()
        (status,) = server.client.get("/ready").json()["nodes"]
        assert (status["role"], status["name"], status["ready"]) == (role, "n0", True)
        assert server.complete().json()["choices"][0]["text"] == server.decode([65])
        assert server.chat(stream=True).status_code == 200
        assert node.generates[0].prefill_nodes == []
        wait_for(lambda: server.metric("pdserve_node_ready", role=role, node=node.address) == 1)
        node.close()
        wait_for(lambda: server.client.get("/ready").status_code == 503)


def test_before_its_hello_the_role_is_not_known(front: Front, decode: FakeNode) -> None:
    decode.silent = True
    with front(decode) as server:
        assert server.client.get("/ready").json()["nodes"][0]["role"] is None
        assert "pdserve_node_ready{" not in server.client.get("/metrics").text
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_another_role_may_come_back_at_the_address(front: Front, decode: FakeNode) -> None:
    with front(decode) as server:
        server.wait_ready()
        decode.close()
        wait_for(lambda: server.service.not_ready_reason is not None)
        again = FakeNode("prefill", "p0", address=decode.address)
        server.wait_ready()
        assert server.service.fleet.statuses()[0].role == "prefill"
        again.close()


def test_a_refused_leg_is_released_through_the_decode_node(front: Front, decode: FakeNode) -> None:
    with front(decode) as server:
        server.wait_ready()
        params = {"do_remote_prefill": True, "remote_engine_id": "p0@e0", "remote_request_id": "l0"}
        assert server.complete(temperature=-1, kv_transfer_params=params).status_code == 400
        wait_for(lambda: decode.released == [KVTransferParams(**params)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_router_drives_two_fronts(front: Front, prefill: FakeNode, decode: FakeNode, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "min_tokens": 2, "stream": stream, "seed": 4}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 3}
    else:
        body["prompt"] = "Hi"
    with front(prefill) as first, front(decode) as second, TwoLegRouter(first.url, second.url) as router:
        first.wait_ready()
        second.wait_ready()
        legs = router.send(path, body, request_id="same")
    (asked,), (fetched,) = prefill.generates, decode.generates
    assert asked.kv_transfer_params == KVTransferParams(**ASK_TO_HOLD)
    assert (asked.sampling.max_tokens, asked.sampling.min_tokens) == (1, 0)
    assert fetched.kv_transfer_params == HELD
    assert (fetched.sampling.max_tokens, fetched.sampling.min_tokens) == (3, 2)
    assert list(asked.prompt_token_ids) == list(fetched.prompt_token_ids)
    assert asked.sampling.seed == fetched.sampling.seed
    assert legs.decode.headers["x-request-id"] == legs.prefill.headers["x-request-id"] == "same"
    assert "kv_transfer_params" not in legs.decode.text
    if stream:
        assert events_of(legs.decode)[-1]["usage"]["completion_tokens"] == 3
    else:
        assert legs.decode.json()["usage"]["completion_tokens"] == 3


def test_the_second_leg_need_not_render_again(front: Front, prefill: FakeNode, decode: FakeNode) -> None:
    with (
        front(prefill) as first,
        front(decode) as second,
        TwoLegRouter(first.url, second.url, reuse_token_ids=True) as router,
    ):
        first.wait_ready()
        second.wait_ready()
        # Only the ids can bring this conversation to the second leg.
        messages = [{"role": "user", "content": "Hi"}]
        answer = router.prefill_leg("/v1/chat/completions", {"messages": messages}, request_id="r")
        other = {"messages": [{"role": "user", "content": None}]}
        with router.decode_leg("/v1/chat/completions", other, answer, request_id="r") as reply:
            reply.read()
    assert reply.status_code == 200
    assert list(decode.generates[0].prompt_token_ids) == list(prefill.generates[0].prompt_token_ids)


def test_the_router_sends_the_whole_request_where_nothing_is_held(
    front: Front, prefill: FakeNode, decode: FakeNode
) -> None:
    prefill.script = answers([65])
    with front(prefill) as first, front(decode) as second, TwoLegRouter(first.url, second.url) as router:
        first.wait_ready()
        second.wait_ready()
        assert router.complete(prompt="Hi").decode.status_code == 200
    assert decode.generates[0].kv_transfer_params is None
