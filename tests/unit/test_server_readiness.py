"""/ready of a ring: not before it was whole once, and from then on as long as anything can be served."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_rig import FakeNode, RunningServer, answers, running_server, wait_for, write_model_directory


@pytest.fixture
def decode() -> Iterator[FakeNode]:
    node = FakeNode()
    node.script = answers([65])
    yield node
    node.close()


@pytest.fixture
def prefill() -> Iterator[FakeNode]:
    node = FakeNode("prefill", "p0")
    yield node
    node.close()


@pytest.fixture
def server(tmp_path: Path, decode: FakeNode, prefill: FakeNode) -> Iterator[RunningServer]:
    with running_server(write_model_directory(tmp_path), [decode.address], [prefill.address]) as server:
        yield server


def make_whole(server: RunningServer, decode: FakeNode) -> None:
    decode.ready_peers = ["p0"]
    server.wait_ready()


def test_a_decode_node_alone_serves_before_the_ring_is_ready(
    server: RunningServer, decode: FakeNode, prefill: FakeNode
) -> None:
    prefill.ready, prefill.reason = False, "loading"
    wait_for(lambda: server.service.not_ready_reason == "no prefill node is ready (p0: loading)")
    assert server.client.get("/ready").status_code == 503
    assert server.complete().status_code == 200
    prefill.ready = True
    wait_for(lambda: server.service.not_ready_reason == "no decode node has met a ready prefill node yet")


def test_once_whole_it_is_ready_without_its_prefill_nodes(
    server: RunningServer, decode: FakeNode, prefill: FakeNode
) -> None:
    make_whole(server, decode)
    prefill.close()
    decode.ready_peers = []
    wait_for(lambda: not server.service.fleet.statuses()[1].ready)
    reply = server.client.get("/ready")
    assert reply.status_code == 200
    assert [node["ready"] for node in reply.json()["nodes"]] == [True, False]
    assert server.complete().status_code == 200
    assert decode.generates[-1].prefill_nodes == []


def test_once_whole_only_the_decode_nodes_matter(server: RunningServer, decode: FakeNode, prefill: FakeNode) -> None:
    make_whole(server, decode)
    decode.ready, decode.reason = False, "busy"
    wait_for(lambda: server.service.not_ready_reason == "no decode node is ready (d0: busy)")
    assert server.client.get("/ready").status_code == 503
    prefill.close()
    wait_for(lambda: not server.service.fleet.statuses()[1].ready)
    decode.ready = True
    server.wait_ready()
    assert server.client.get("/ready").status_code == 200


def test_a_moment_of_wholeness_counts_though_nobody_looked(
    server: RunningServer, decode: FakeNode, prefill: FakeNode
) -> None:
    wait_for(lambda: "met" in (server.service.not_ready_reason or ""))
    decode.ready_peers = ["p0"]
    wait_for(lambda: server.service.fleet._takers[0].view().ready_peers)
    decode.ready_peers = []
    wait_for(lambda: not server.service.fleet._takers[0].view().ready_peers)
    assert server.client.get("/ready").status_code == 200
