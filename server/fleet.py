"""All nodes of one server: which are fit to serve together, which one a request goes to, and their heartbeat."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from connector.codec import PROTOCOL_VERSION
from connector.identity import ModelIdentity
from connector.link import Links
from connector.server_messages import Generate, NodeHello, TokenOutput
from engine.errors import ErrorKind, ServingError
from engine.sampling_params import SamplingParams
from server.config import ServerConfig
from server.metrics import Metrics
from server.node_client import NodeClient, OutputSink
from server.router import pick_decode, rank_prefill

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node, for people and probes."""

    role: str
    address: str
    name: str
    ready: bool
    reason: str | None


class Fleet:
    """The configured nodes. Belongs to the event loop it was started in."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._decode = [NodeClient(address, "decode", metrics) for address in config.decode]
        self._prefill = [NodeClient(address, "prefill", metrics) for address in config.prefill]
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

    def submit(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, cache_salt: str, sink: OutputSink
    ) -> "Flight":
        """Sends one sequence to a decode node. Raises `ServingError` if none is ready."""
        self._turn += 1
        decode = {node.name: node for node in self._ready(self._decode)}
        prefill = {node.name: node for node in self._ready(self._prefill)}
        prefill_views = [node.view() for node in prefill.values()]
        chosen = pick_decode([node.view() for node in decode.values()], prefill_views, self._turn)
        if chosen is None:
            raise ServingError(self.no_decode_reason or "no decode node", kind=ErrorKind.NO_NODE_READY)
        candidates = rank_prefill(prefill_views, chosen, self._turn)
        flight = Flight(request_id, decode[chosen.name], prefill[candidates[0]] if candidates else None, sink)
        message = Generate(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling=sampling,
            cache_salt=cache_salt,
            prefill_nodes=candidates,
        )
        flight.start(message)
        return flight

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus output that every node can take; None before a decode node said hello."""
        lengths = [node.hello.max_model_len for node in self._nodes if node.hello and not self._refusal(node)]
        return min(lengths, default=None) if self._reference else None

    @property
    def no_decode_reason(self) -> str | None:
        """Why nothing can be served at all; None if something can."""
        if self._ready(self._decode):
            return None
        return self._story("no decode node is ready", self._decode)

    @property
    def not_ready_reason(self) -> str | None:
        """Why the ring is not whole; None if it is."""
        reason = self.no_decode_reason
        if reason is not None or not self._prefill:
            return reason
        prefill = {node.name for node in self._ready(self._prefill)}
        if not prefill:
            return self._story("no prefill node is ready", self._prefill)
        if not any(node.view().ready_peers & prefill for node in self._ready(self._decode)):
            return "no decode node has met a ready prefill node yet"
        return None

    def statuses(self) -> list[NodeStatus]:
        return [
            NodeStatus(role=node.role, address=node.address, name=node.name, ready=reason is None, reason=reason)
            for node in self._nodes
            for reason in [self._not_ready_reason(node)]
        ]

    @property
    def _nodes(self) -> list[NodeClient]:
        return self._decode + self._prefill

    @property
    def _reference(self) -> ModelIdentity | None:
        """What all must serve: the model of the first decode node that is known."""
        return next((node.identity for node in self._decode if node.identity is not None), None)

    def _ready(self, nodes: Sequence[NodeClient]) -> list[NodeClient]:
        return [node for node in nodes if self._not_ready_reason(node) is None]

    def _not_ready_reason(self, node: NodeClient) -> str | None:
        return self._refusal(node) or node.not_ready_reason

    def _refusal(self, node: NodeClient) -> str | None:
        """Why a node that said hello cannot serve in this fleet."""
        if node.hello is None:
            return None
        names = Counter(other.name for other in self._nodes if other.hello)
        if names[node.name] > 1:
            return f"incompatible: another node is called {node.name} too"
        return _refuse(node.hello, node.role, self._reference)

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


def _refuse(hello: NodeHello, role: str, reference: ModelIdentity | None) -> str | None:
    if hello.protocol_version != PROTOCOL_VERSION:
        return f"incompatible: protocol version {hello.protocol_version}, the server speaks {PROTOCOL_VERSION}"
    if hello.role != role:
        return f"incompatible: it is a {hello.role} node, but was given as --{role}"
    differences = reference.mismatch(hello.model) if reference else None
    return f"incompatible with the first decode node: {differences}" if differences else None
