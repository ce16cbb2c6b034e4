"""Which nodes a request goes to. Pure: views of the ready nodes in, a choice out.

Least load decides, and nodes of equal load take turns: a burst that arrives between two heartbeats must not land on one
node. `turn` is a counter of the caller's that grows with each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A ready node as the router sees it."""

    name: str
    load: int
    """Requests there: those of this server, now, plus those of others, as of the last heartbeat."""
    ready_peers: frozenset[str] = frozenset()
    """On a decode node: the prefill nodes it can reach."""


def pick_decode(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], turn: int, *, holder: str | None = None
) -> NodeView | None:
    """The decode node for the next request; None if there is none.

    Where KV for it is held somewhere, the holder itself comes first, then a node that reaches it. While prefill nodes
    exist, a decode node that reaches at least one comes before one that reaches none.
    """
    names = {node.name for node in prefill}
    by_preference = (
        [node for node in decode if node.name == holder],
        [node for node in decode if holder in node.ready_peers],
        [node for node in decode if node.ready_peers & names],
        decode,
    )
    ranked = _by_load(next((nodes for nodes in by_preference if nodes), ()), turn)
    return ranked[0] if ranked else None


def rank_prefill(prefill: Sequence[NodeView], decode: NodeView, turn: int) -> list[str]:
    """Names of the prefill nodes that `decode` reaches, best first."""
    return [node.name for node in _by_load([node for node in prefill if node.name in decode.ready_peers], turn)]


def _by_load(nodes: Sequence[NodeView], turn: int) -> list[NodeView]:
    if not nodes:
        return []
    start = turn % len(nodes)
    return sorted([*nodes[start:], *nodes[:start]], key=lambda node: node.load)
