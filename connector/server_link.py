"""A node's end of the link to the servers: requests in, tokens out, one message per step and server."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from connector.codec import encode
from connector.held_params import to_params
from connector.kv_transfer_params import KVTransferParams
from connector.link import Endpoint, Links
from connector.server_messages import (
    Cancel,
    FinishReason,
    FromNode,
    Generate,
    NodeGoodbye,
    NodeHello,
    NodeLoad,
    NodePong,
    ReleaseKV,
    ServerHello,
    ServerPing,
    TokenOutput,
    Tokens,
    decode_from_server,
)
from engine.errors import ErrorKind, MalformedMessage, RequestError
from engine.outputs import RequestOutput
from engine.request import Request, RequestState

logger = logging.getLogger(__name__)

FINISH_REASONS: dict[RequestState, FinishReason] = {
    RequestState.FINISHED_STOPPED: "stop",
    RequestState.FINISHED_LENGTH: "length",
    RequestState.FINISHED_ABORTED: "abort",
    RequestState.FINISHED_ERROR: "error",
}


class RequestTaker(Protocol):
    """The engine's loop, as the server link sees it."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What a node says of itself at one moment. `reason` says why it is not ready."""

    reason: str
    load: NodeLoad
    ready_peers: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDoor:
    """What the node does with what servers say. Called in the link's thread."""

    make_request: Callable[[Generate, str], Request]
    """Raises `RequestError` for what this node cannot do."""
    release: Callable[[KVTransferParams], None]
    status: Callable[[], NodeStatus]


@dataclass(slots=True)
class _Server:
    last_heard: float
    requests: dict[str, str] = field(default_factory=dict)
    """The server's request id -> ours."""


class ServerLink:
    """Implements `LinkHandler`. The link's thread adds to the tables and the engine's thread takes out of them, one
    dict operation at a time."""

    def __init__(
        self,
        hello: NodeHello,
        taker: RequestTaker,
        door: RequestDoor,
        server_timeout: float,
    ) -> None:
        self.num_malformed = 0
        self._hello = hello
        self._taker = taker
        self._door = door
        self._server_timeout = server_timeout
        self._servers: dict[bytes, _Server] = {}
        self._owners: dict[str, tuple[bytes, str]] = {}
        """Our request id -> (server, the server's request id)."""
        self._endpoint: Endpoint | None = None

    def listen(self, links: Links, address: str) -> str:
        """Returns the address with its real port."""
        self._endpoint = links.listen(address, self)
        links.every(self._server_timeout / 4, self.tick)
        return self._endpoint.address

    def say_goodbye(self, reason: str) -> None:
        for server in list(self._servers):
            self._send(server, NodeGoodbye(reason=reason))

    # The engine's side

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Sends one step's outputs, one message to each server concerned."""
        by_server: defaultdict[bytes, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                self._send_prompt_logprobs(output, *owner)
                by_server[owner[0]].append(_token_output(output, owner[1]))
                if output.finish_state is not None:
                    self._forget(output.request_id)
        for server, tokens in by_server.items():
            self._send(server, Tokens(outputs=tokens))

    def _send_prompt_logprobs(self, output: RequestOutput, server: bytes, request_id: str) -> None:
        """A message each: together they could be larger than a message may be."""
        for piece in output.prompt_logprobs:
            self._send(server, Tokens(outputs=[TokenOutput(request_id=request_id, prompt_logprobs=piece)]))

    def refuse(self, request: Request, kind: ErrorKind, reason: str, param: str | None = None) -> None:
        """`param` is the field at fault where the client is."""
        owner = self._owners.get(request.request_id)
        if owner is not None:
            self._forget(request.request_id)
            self._refuse(*owner, reason, kind=kind, param=param)

    # The link's side

    def on_up(self, peer: bytes) -> None:
        pass

    def on_down(self, peer: bytes) -> None:
        self._lose(peer, "its connection is gone")

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        try:
            message = decode_from_server.decode(frames[0] if frames else b"")
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.warning("dropped a message on the server link: %s", str(error))
            return
        server = self._servers.setdefault(peer, _Server(time.monotonic()))
        server.last_heard = time.monotonic()
        match message:
            case ServerHello():
                self._send(peer, self._hello)
            case ServerPing(sequence=sequence):
                self._send(peer, self._pong(sequence))
            case Generate():
                self._on_generate(peer, server, message)
            case ReleaseKV(kv_transfer_params=params):
                self._door.release(params)
            case Cancel(request_ids=request_ids):
                for request_id in request_ids:
                    if (ours := server.requests.get(request_id)) is not None:
                        self._taker.abort(ours)

    def tick(self) -> None:
        now = time.monotonic()
        for peer, server in list(self._servers.items()):
            if now - server.last_heard > self._server_timeout:
                self._lose(peer, f"silent for {now - server.last_heard:.1f} s")

    def _on_generate(self, peer: bytes, server: _Server, message: Generate) -> None:
        if message.request_id in server.requests:
            self._refuse(peer, message.request_id, "this request id is in use", param="request_id")
            return
        ours = f"{message.request_id}@{peer.hex()}"
        try:
            request = self._door.make_request(message, ours)
        except RequestError as error:
            self._refuse(peer, message.request_id, str(error), param=error.param)
            return
        server.requests[message.request_id] = ours
        self._owners[ours] = (peer, message.request_id)
        self._taker.submit(request)

    def _refuse(
        self,
        peer: bytes,
        request_id: str,
        reason: str,
        *,
        kind: ErrorKind = ErrorKind.INVALID_REQUEST,
        param: str | None = None,
    ) -> None:
        output = TokenOutput(
            request_id=request_id, finish_reason="error", error_kind=kind, error=reason, error_param=param or ""
        )
        self._send(peer, Tokens(outputs=[output]))

    def _pong(self, sequence: int) -> NodePong:
        status = self._door.status()
        return NodePong(
            sequence=sequence,
            ready=not status.reason,
            reason=status.reason,
            load=status.load,
            ready_peers=status.ready_peers,
        )

    def _forget(self, request_id: str) -> None:
        peer, theirs = self._owners.pop(request_id)
        if peer in self._servers:
            self._servers[peer].requests.pop(theirs, None)

    def _lose(self, peer: bytes, reason: str) -> None:
        server = self._servers.pop(peer, None)
        if server is None:
            return
        if server.requests:
            logger.warning("lost a server with %d requests: %s", len(server.requests), reason)
        for ours in list(server.requests.values()):
            self._taker.abort(ours)

    def _send(self, peer: bytes, message: FromNode) -> None:
        if self._endpoint is not None:
            self._endpoint.send([encode(message)], peer)


def _token_output(output: RequestOutput, request_id: str) -> TokenOutput:
    kind, text = output.error if output.error is not None else (None, "")
    return TokenOutput(
        request_id=request_id,
        tokens=list(output.new_tokens),
        finish_reason=None if output.finish_state is None else FINISH_REASONS[output.finish_state],
        stop_reason=output.stop_reason,
        is_last_text=output.is_last_text,
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        error_kind=kind,
        error=text,
        kv_transfer_params=to_params(output.kv_transfer_params) if output.kv_transfer_params else None,
    )
