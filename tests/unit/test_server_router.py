"""Which node a request goes to."""

from server.router import NodeView, pick_decode, rank_prefill


def decode(name: str, load: int = 0, peers: tuple[str, ...] = ("p0", "p1")) -> NodeView:
    return NodeView(name=name, load=load, ready_peers=frozenset(peers))


def prefill(name: str, load: int = 0) -> NodeView:
    return NodeView(name=name, load=load)


def name_of(node: NodeView | None) -> str | None:
    return node.name if node else None


def test_no_node_no_choice() -> None:
    assert pick_decode([], [prefill("p0")], 0) is None
    assert rank_prefill([], decode("d0"), 0) == []


def test_the_least_loaded_node_is_chosen() -> None:
    nodes = [decode("d0", 3), decode("d1", 1), decode("d2", 2)]
    assert [name_of(pick_decode(nodes, [], turn)) for turn in range(3)] == ["d1"] * 3


def test_nodes_of_equal_load_take_turns() -> None:
    nodes = [decode("d0"), decode("d1"), decode("d2", 5)]
    assert {name_of(pick_decode(nodes, [], turn)) for turn in range(6)} == {"d0", "d1"}


def test_a_decode_node_that_reaches_a_prefill_node_comes_first() -> None:
    nodes = [decode("d0", 0, peers=("gone",)), decode("d1", 9)]
    assert name_of(pick_decode(nodes, [prefill("p0")], 0)) == "d1"
    assert name_of(pick_decode(nodes[:1], [prefill("p0")], 0)) == "d0"


def test_the_holder_of_kv_comes_first_then_who_reaches_it() -> None:
    nodes = [decode("d0", 9, peers=("p1",)), decode("d1", 5, peers=("p0",)), decode("d2", 0, peers=("p0",))]
    views = [prefill("p0"), prefill("p1")]
    assert name_of(pick_decode(nodes, views, 0, holder="d0")) == "d0"
    assert name_of(pick_decode(nodes, views, 0, holder="p1")) == "d0"
    assert name_of(pick_decode(nodes, views, 0, holder="p0")) == "d2"
    assert name_of(pick_decode(nodes, views, 0, holder="gone")) == "d2"
    assert name_of(pick_decode(nodes, [], 0, holder=None)) == "d2"


def test_prefill_candidates_are_those_in_reach_best_first() -> None:
    nodes = [prefill("p0", 2), prefill("p1", 1), prefill("p2", 0)]
    assert rank_prefill(nodes, decode("d0"), 0) == ["p1", "p0"]


def test_prefill_nodes_of_equal_load_take_turns() -> None:
    nodes = [prefill("p0"), prefill("p1")]
    assert {rank_prefill(nodes, decode("d0"), turn)[0] for turn in range(2)} == {"p0", "p1"}
