"""The server's end of the link to one node.

  DOWN --on_up--> GREETED --NodeHello--> MET --NodePong(ready)--> ready
   ^                 |                    |
   +---- on_down ----+---- silence -------+     and a NodeHello of a new epoch: lost and met at once

Losing a node fails its requests, each with one final output. The link dials again by itself; the next hello starts over
and cancels what the node may still be computing for requests that were failed here.

Link callbacks come in the link's thread and cross to the event loop once per message; all state belongs to the loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from connector import failpoints
from connector.codec import PROTOCOL_VERSION, encode
from connector.identity import ModelIdentity
from connector.kv_transfer_params import KVTransferParams
from connector.link import Endpoint, LinkHandler, Links
from connector.server_messages import (
    Cancel,
    FromNode,
    FromServer,
    Generate,
    NodeGoodbye,
    NodeHello,
    NodeLoad,
    NodePong,
    ReleaseKV,
    Role,
    ServerHello,
    ServerPing,
    TokenOutput,
    Tokens,
    decode_from_node,
)
from engine.errors import ErrorKind, MalformedMessage
from server.metrics import Metrics
from server.router import NodeView

logger = logging.getLogger(__name__)

SEQUENCES_PER_SEAT = 4
"""How many sequences a node may have for each that it runs at once: one that would wait longer is better sent away."""
MIN_QUEUE = 256


class OutputSink(Protocol):
    """Where the outputs of one request go: any number without, then exactly one with a finish reason."""

    def put(self, output: TokenOutput, now: float) -> None: ...


class NodeClient(LinkHandler):
    """One configured node address."""

    def __init__(self, address: str, role: Role | None, metrics: Metrics, on_pong: Callable[[], None]) -> None:
        self.address = address
        self.expected_role = role
        """None: either will do."""
        self.role = role
        """As expected, else as the node last said; None until then."""
        self.hello: NodeHello | None = None
        self.num_expected = 0
        """On a prefill node: sequences that have it as first candidate and no token yet."""
        self._metrics = metrics
        self._on_pong = on_pong
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoint: Endpoint | None = None
        self._is_up = False
        self._last_heard = 0.0
        self._sequence = 0
        self._pong: NodePong | None = None
        self._num_here_at_pong = 0
        self._sinks: dict[str, OutputSink] = {}
        self._orphans: list[str] = []
        self._down_reason = "not reached yet"

    # -- for the fleet, in the event loop

    def dial(self, links: Links, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._endpoint = links.dial(self.address, self)

    def hang_up(self) -> None:
        """No callback comes after this returns: the loop may then be closed."""
        if self._endpoint is not None:
            self._endpoint.close()

    @property
    def name(self) -> str:
        return self.hello.name if self.hello else self.address

    @property
    def identity(self) -> ModelIdentity | None:
        return self.hello.model if self.hello else None

    @property
    def not_ready_reason(self) -> str | None:
        """None if the node takes requests."""
        if self.hello is None:
            return self._down_reason
        if self._pong is None:
            return "no heartbeat answered yet"
        return None if self._pong.ready else (self._pong.reason or "not ready")

    @property
    def capacity(self) -> int:
        """Sequences that the node runs or lets wait before it is full."""
        seats = self.hello.max_num_seqs if self.hello else 0
        return max(MIN_QUEUE, SEQUENCES_PER_SEAT * seats)

    @property
    def is_full(self) -> bool:
        return self.view().load >= self.capacity

    @property
    def num_requests(self) -> int:
        """Sequences of this server at this node."""
        return len(self._sinks) + self.num_expected

    @property
    def kv_usage(self) -> float:
        return self._pong.load.kv_usage if self._pong else 0.0

    def view(self) -> NodeView:
        """For the router. Others' requests are what the node reported beyond ours at that time."""
        load = self._pong.load if self._pong else NodeLoad()
        others = max(0, load.num_running + load.num_waiting - self._num_here_at_pong)
        peers = frozenset(self._pong.ready_peers) if self._pong else frozenset()
        return NodeView(name=self.name, load=self.num_requests + others, ready_peers=peers)

    def generate(self, message: Generate, sink: OutputSink) -> None:
        self._sinks[message.request_id] = sink
        if not (failpoints.armed and failpoints.hit("server.before_generate")):
            self._send(message)

    def cancel(self, request_id: str) -> None:
        """Nothing more comes for this request. Does nothing if it is already over."""
        if self._sinks.pop(request_id, None) is not None:
            self._send(Cancel(request_ids=[request_id]))

    def release(self, params: KVTransferParams) -> None:
        self._send(ReleaseKV(kv_transfer_params=params))

    def beat(self, now: float, timeout: float) -> None:
        """One heartbeat: ping, greet again if unanswered, and give up a node that is silent."""
        if not self._is_up:
            return
        if self.hello is not None and now - self._last_heard > timeout:
            self._lose(f"silent for {timeout:g} s")
        if self.hello is None:
            self._send(ServerHello(protocol_version=PROTOCOL_VERSION))
        self._ping()

    # -- link callbacks, in the link's thread

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        try:
            message = decode_from_node.decode(frames[0])
        except (MalformedMessage, IndexError) as error:
            self._metrics.malformed.inc()
            logger.warning("%s sent something that is no message: %s", self.address, error)
            return
        self._in_loop(lambda: self._receive(message))

    def on_up(self, peer: bytes) -> None:
        self._in_loop(self._greet)

    def on_down(self, peer: bytes) -> None:
        self._in_loop(self._disconnected)

    # -- in the event loop

    def _in_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    def _greet(self) -> None:
        self._is_up = True
        self._send(ServerHello(protocol_version=PROTOCOL_VERSION))

    def _disconnected(self) -> None:
        self._is_up = False
        self._lose("the connection was lost")

    def _receive(self, message: FromNode) -> None:
        now = self._last_heard = time.monotonic()
        match message:
            case Tokens():
                self._deliver(message.outputs, now)
            case NodePong():
                self._pong = message if self.hello else None
                self._num_here_at_pong = self.num_requests
                self._on_pong()
            case NodeHello():
                self._meet(message)
            case NodeGoodbye():
                logger.info("%s says goodbye: %s", self.name, message.reason)
                self._pong = None
                self._forget(f"going down: {message.reason}")
            case _:
                assert_never(message)

    def _deliver(self, outputs: Sequence[TokenOutput], now: float) -> None:
        if failpoints.armed:
            failpoints.hit("server.on_tokens")
        for output in outputs:
            request_id = output.request_id
            sink = self._sinks.get(request_id)
            if sink is None:
                self._drop_late(output)
                continue
            if output.finish_reason is not None:
                del self._sinks[request_id]
            sink.put(output, now)

    def _drop_late(self, output: TokenOutput) -> None:
        self._metrics.late_outputs.inc()
        if output.kv_transfer_params is not None:
            # Held for a request that was given up meanwhile: nobody will be told where.
            self._metrics.kv_releases.inc()
            self.release(output.kv_transfer_params)

    def _meet(self, hello: NodeHello) -> None:
        if self.hello is not None and self.hello.epoch != hello.epoch:
            self._lose("it was restarted")
        if self.hello is None:
            logger.info("met %s node %s at %s", hello.role, hello.name, self.address)
        self.hello = hello
        self.role = self.expected_role or hello.role
        if self._orphans:
            self._send(Cancel(request_ids=self._orphans))
            self._orphans = []
        self._ping()

    def _lose(self, why: str) -> None:
        """The node is gone: what it was doing for us fails, and it has to introduce itself again."""
        if self.hello is not None:
            logger.warning("lost %s node %s: %s", self.role, self.name, why)
            self._metrics.node_losses.labels(self.role, self.address).inc()
        error = f"{self.role} node {self.name}: {why}"
        self._forget(why)
        sinks, self._sinks = self._sinks, {}
        self._orphans.extend(sinks)
        now = time.monotonic()
        for request_id, sink in sinks.items():
            sink.put(_failure(request_id, error), now)

    def _forget(self, why: str) -> None:
        self.hello = self._pong = None
        self._down_reason = why

    def _ping(self) -> None:
        self._sequence += 1
        self._send(ServerPing(sequence=self._sequence))

    def _send(self, message: FromServer) -> None:
        assert self._endpoint is not None
        self._endpoint.send([encode(message)])


def _failure(request_id: str, error: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, finish_reason="error", error_kind=ErrorKind.PEER_UNREACHABLE, error=error)
