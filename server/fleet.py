"""All nodes of one server: which are fit to serve together, which one a request goes to, and their heartbeat.

With --decode and --prefill they are a ring: requests go to a decode node. With --node there is one, of whatever role,
and requests go to it.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connector.codec import PROTOCOL_VERSION
from connector.identity import ModelIdentity
from connector.kv_transfer_params import KVTransferParams, split_engine_id
from connector.link import Links
from connector.server_messages import Generate, NodeHello, TokenOutput
from engine.errors import ErrorKind, ServingError
from engine.sampling_params import SamplingParams
from engine.trace import TraceContext
from server.config import ServerConfig
from server.metrics import Metrics
from server.node_client import NodeClient, OutputSink
from server.router import pick_decode, rank_prefill

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node, for people and probes."""

    role: str | None
    """None for the node of --node until it has said what it is."""
    address: str
    name: str
    ready: bool
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence for a node, less what routing adds."""

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    trace: TraceContext | None = None
    kv_transfer_params: KVTransferParams | None = None

    @property
    def holder(self) -> str | None:
        """The node that holds KV for it, by name."""
        params = self.kv_transfer_params
        return _holder(params) if params is not None and params.do_remote_prefill else None


class Fleet:
    """The configured nodes. Belongs to the event loop it was started in."""

    def __init__(self, config: ServerConfig, metrics: Metrics, config_digest: str) -> None:
        """`config_digest`: of the model whose tokenizer this server uses."""
        self._config = config
        self._config_digest = config_digest
        self._metrics = metrics
        self._takers = [NodeClient(address, "decode", metrics, self._note_whole) for address in config.decode]
        """Where requests go: the decode nodes, or the node of --node."""
        if config.node is not None:
            self._takers.append(NodeClient(config.node, None, metrics, self._note_whole))
        self._prefill = [NodeClient(address, "prefill", metrics, self._note_whole) for address in config.prefill]
        self._judged_hellos: list[NodeHello | None] = []
        self._refusals: dict[NodeClient, str | None] = {}
        self._was_whole = False
        self._turn = 0
        self._heartbeat: asyncio.Task[None] | None = None

    def start(self, links: Links) -> None:
        loop = asyncio.get_running_loop()
        for node in self._nodes:
            node.dial(links, loop)
        self._heartbeat = loop.create_task(self._beat_forever())

    async def stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        for node in self._nodes:
            node.hang_up()

    def submit(self, work: Work, sink: OutputSink) -> "Flight":
        """Sends one sequence to a node that takes requests. Raises `ServingError` if none is ready."""
        self._turn += 1
        takers = {node.name: node for node in self._ready(self._takers)}
        prefill = {node.name: node for node in self._ready(self._prefill)}
        prefill_views = [node.view() for node in prefill.values()]
        views = [node.view() for node in takers.values()]
        chosen = pick_decode(views, prefill_views, self._turn, holder=work.holder)
        if chosen is None:
            raise ServingError(self.cannot_serve_reason or "no decode node", kind=ErrorKind.NO_NODE_READY)
        candidates = rank_prefill(prefill_views, chosen, self._turn)
        # Where KV is held already, the candidates are only the way out if it cannot be fetched.
        computes = prefill[candidates[0]] if candidates and work.holder is None else None
        flight = Flight(work.request_id, takers[chosen.name], computes, sink)
        flight.start(_message(work, candidates))
        return flight

    def release(self, params: KVTransferParams) -> None:
        """Nobody will fetch this KV: tells its holder, or all who may know the holder if it is none of our nodes."""
        self._metrics.kv_releases.inc()
        known = [node for node in self._nodes if node.hello is not None and self._refusal(node) is None]
        for node in [node for node in known if node.name == _holder(params)] or known:
            node.release(params)

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus output that every node can take; None before a decode node said hello."""
        lengths = [node.hello.max_model_len for node in self._nodes if node.hello and not self._refusal(node)]
        return min(lengths, default=None) if self._reference else None

    @property
    def capacity(self) -> int:
        """Sequences that the ready nodes to which requests go run or let wait; 0 if none is ready. Asked for every
        request, so it does not look whether the nodes fit together."""
        return sum(node.capacity for node in self._takers if node.not_ready_reason is None)

    @property
    def is_full(self) -> bool:
        """Whether every ready node has as many as that, as of its last heartbeat."""
        ready = [node for node in self._takers if node.not_ready_reason is None]
        return bool(ready) and all(node.is_full for node in ready)

    @property
    def cannot_serve_reason(self) -> str | None:
        """Why nothing can be served at all; None if something can."""
        if self._ready(self._takers):
            return None
        headline = "no decode node is ready" if self._config.node is None else "the node is not ready"
        return self._story(headline, self._takers)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None if it may.

        A ring that is still being started is not ready before it is whole: until then all prompts would be computed on
        the decode nodes. One that was whole stays ready as long as a decode node is: without its prefill nodes it is
        slower, but a load balancer that turned away from it would turn a slow answer into none.
        """
        reason = self.cannot_serve_reason
        return reason if reason is not None or self._was_whole else self._not_whole_reason()

    def statuses(self) -> list[NodeStatus]:
        return [
            NodeStatus(role=node.role, address=node.address, name=node.name, ready=reason is None, reason=reason)
            for node in self._nodes
            for reason in [self._not_ready_reason(node)]
        ]

    @property
    def _nodes(self) -> list[NodeClient]:
        return self._takers + self._prefill

    @property
    def _reference(self) -> ModelIdentity | None:
        """What all must serve: the model of the first decode node that is known."""
        return next((node.identity for node in self._takers if node.identity is not None), None)

    def _note_whole(self) -> None:
        """After every heartbeat answered, so that a ring that is whole only briefly, or unwatched, counts too."""
        if not self._was_whole and self.cannot_serve_reason is None:
            self._was_whole = self._not_whole_reason() is None

    def _not_whole_reason(self) -> str | None:
        """Which part is missing besides the nodes that requests go to; None if none is."""
        if not self._prefill:
            return None
        prefill = {node.name for node in self._ready(self._prefill)}
        if not prefill:
            return self._story("no prefill node is ready", self._prefill)
        if not any(node.view().ready_peers & prefill for node in self._ready(self._takers)):
            return "no decode node has met a ready prefill node yet"
        return None

    def _ready(self, nodes: Sequence[NodeClient]) -> list[NodeClient]:
        return [node for node in nodes if self._not_ready_reason(node) is None]

    def _not_ready_reason(self, node: NodeClient) -> str | None:
        return self._refusal(node) or node.not_ready_reason

    def _refusal(self, node: NodeClient) -> str | None:
        """Why a node that said hello cannot serve in this fleet. Every request asks this of every node."""
        hellos = [other.hello for other in self._nodes]
        if hellos != self._judged_hellos:
            names = Counter(other.name for other in self._nodes if other.hello)
            self._refusals = {other: self._judge(other, names) for other in self._nodes}
            self._judged_hellos = hellos
        return self._refusals[node]

    def _judge(self, node: NodeClient, names: Mapping[str, int]) -> str | None:
        if node.hello is None:
            return None
        if names[node.name] > 1:
            return f"incompatible: another node is called {node.name} too"
        if node.hello.model.config_digest != self._config_digest:
            return "incompatible: it serves another model than the server's --model"
        return _refuse(node.hello, node.expected_role, self._reference)

    def _story(self, headline: str, nodes: Sequence[NodeClient]) -> str:
        details = [f"{node.name}: {reason}" for node in nodes if (reason := self._not_ready_reason(node))]
        return f"{headline} ({'; '.join(details)})"

    async def _beat_forever(self) -> None:
        while True:
            for node in self._nodes:
                node.beat(time.monotonic(), self._config.node_timeout)
                self._measure(node)
            await asyncio.sleep(self._config.heartbeat_interval)

    def _measure(self, node: NodeClient) -> None:
        if node.role is None:
            return
        labels = (node.role, node.address)
        self._metrics.node_ready.labels(*labels).set(self._not_ready_reason(node) is None)
        self._metrics.node_requests.labels(*labels).set(node.num_requests)
        self._metrics.node_kv_usage.labels(*labels).set(node.kv_usage)


class Flight:
    """One sequence on its way through a decode node, and the place it takes at the prefill node meanwhile."""

    def __init__(self, request_id: str, decode: NodeClient, prefill: NodeClient | None, sink: OutputSink) -> None:
        self.request_id = request_id
        self._decode = decode
        self._prefill = prefill
        self._sink = sink

    def start(self, message: Generate) -> None:
        if self._prefill is not None:
            self._prefill.num_expected += 1
        self._decode.generate(message, self)

    def put(self, output: TokenOutput, now: float) -> None:
        if self._prefill is not None and (output.tokens or output.finish_reason):
            self._leave_prefill()
        self._sink.put(output, now)

    def cancel(self) -> None:
        """Stops the work on the nodes; no output comes after this. Does nothing once the sequence is over."""
        self._leave_prefill()
        self._decode.cancel(self.request_id)

    def _leave_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.num_expected -= 1
            self._prefill = None


def _holder(params: KVTransferParams) -> str | None:
    """The node's name."""
    holder = split_engine_id(params.remote_engine_id)
    return holder[0] if holder is not None else None


def _message(work: Work, candidates: list[str]) -> Generate:
    return Generate(
        request_id=work.request_id,
        prompt_token_ids=list(work.token_ids),
        sampling=work.sampling,
        cache_salt=work.cache_salt,
        priority=work.priority,
        trace=work.trace,
        prefill_nodes=candidates,
        kv_transfer_params=work.kv_transfer_params,
    )


def _refuse(hello: NodeHello, role: str | None, reference: ModelIdentity | None) -> str | None:
    if hello.protocol_version != PROTOCOL_VERSION:
        return f"incompatible: protocol version {hello.protocol_version}, the server speaks {PROTOCOL_VERSION}"
    if role not in (None, hello.role):
        return f"incompatible: it is a {hello.role} node, but was given as --{role}"
    differences = reference.mismatch(hello.model) if reference else None
    return f"incompatible with the first decode node: {differences}" if differences else None
