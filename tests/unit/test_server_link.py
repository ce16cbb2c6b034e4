from dataclasses import dataclass, field

import pytest

from connector.codec import PROTOCOL_VERSION, encode
from connector.kv_transfer_params import KVTransferParams
from connector.memory_link import MemoryLinks, MemoryNetwork
from connector.server_link import NodeStatus, RequestDoor, ServerLink
from connector.server_messages import (
    Cancel,
    Generate,
    NodeGoodbye,
    NodeHello,
    NodeLoad,
    NodePong,
    ReleaseKV,
    ServerHello,
    ServerPing,
    Tokens,
    decode_from_node,
)
from engine.errors import ErrorKind
from engine.outputs import RequestOutput
from engine.request import Request, RequestState, SampledToken
from engine.sampling_params import SamplingParams
from tests.unit.test_kv_transfer import IDENTITY

HELLO = NodeHello(
    protocol_version=PROTOCOL_VERSION,
    role="decode",
    name="d0",
    epoch="e",
    model=IDENTITY,
    max_model_len=64,
    num_blocks=8,
)


@dataclass
class RecordingTaker:
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Server:
    """The other end: keeps what it got."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.messages: list[object] = []
        self.links = MemoryLinks(network)
        self.endpoint = self.links.dial("mem://d0", self)

    def say(self, message: object) -> None:
        self.endpoint.send([encode(message)])

    def on_message(self, peer, frames) -> None:
        self.messages.append(decode_from_node.decode(frames[0]))

    def on_up(self, peer) -> None:
        pass

    def on_down(self, peer) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.taker = RecordingTaker()
        self.links = MemoryLinks(self.network)
        self.link = ServerLink(HELLO, self.taker, self._door(), server_timeout=10.0)
        self.link.listen(self.links, "mem://d0")

    def _door(self) -> RequestDoor:
        self.released: list[KVTransferParams] = []
        return RequestDoor(make_request=self._make_request, release=self.released.append, status=self._status)

    def _make_request(self, message: Generate, request_id: str) -> Request:
        return Request(request_id=request_id, prompt_token_ids=message.prompt_token_ids, sampling=message.sampling)

    def _status(self) -> NodeStatus:
        return NodeStatus(reason="loading", load=NodeLoad(num_running=3), ready_peers=["p0"])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def generate(request_id: str = "r") -> Generate:
    return Generate(request_id=request_id, prompt_token_ids=[1, 2], sampling=SamplingParams())


def output(request: Request, *tokens: int, state: RequestState | None = None) -> RequestOutput:
    return RequestOutput(request.request_id, [SampledToken(t) for t in tokens], state, None, 2, 0, None, None)


def test_hello_and_ping_are_answered(rig: Rig):
    server = Server(rig.network)
    server.say(ServerHello(protocol_version=PROTOCOL_VERSION))
    server.say(ServerPing(sequence=5))
    rig.network.pump()
    pong = NodePong(sequence=5, ready=False, reason="loading", load=NodeLoad(num_running=3), ready_peers=["p0"])
    assert server.messages == [HELLO, pong]


def test_two_servers_may_use_one_request_id(rig: Rig):
    servers = [Server(rig.network), Server(rig.network)]
    for server in servers:
        server.say(generate("same"))
    rig.network.pump()
    first, second = rig.taker.requests
    assert first.request_id != second.request_id
    rig.link.deliver([output(first, 7), output(second, 8, 9)])
    rig.network.pump()
    told = [[t.token_id for m in server.messages for o in m.outputs for t in o.tokens] for server in servers]
    assert told == [[7], [8, 9]]


def test_a_step_is_one_message_for_each_server(rig: Rig):
    server = Server(rig.network)
    for name in "abc":
        server.say(generate(name))
    rig.network.pump()
    rig.link.deliver([output(request, 1) for request in rig.taker.requests])
    rig.network.pump()
    (message,) = server.messages
    assert isinstance(message, Tokens)
    assert [o.request_id for o in message.outputs] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (RequestState.FINISHED_STOPPED, "stop"),
        (RequestState.FINISHED_LENGTH, "length"),
        (RequestState.FINISHED_ABORTED, "abort"),
        (RequestState.FINISHED_ERROR, "error"),
    ],
)
def test_the_final_output_says_how_and_ends_the_request(rig: Rig, state: RequestState, reason: str):
    server = Server(rig.network)
    server.say(generate())
    rig.network.pump()
    (request,) = rig.taker.requests
    rig.link.deliver([output(request, 7, state=state)])
    rig.link.deliver([output(request, 8)])
    rig.network.pump()
    assert [o.finish_reason for m in server.messages for o in m.outputs] == [reason]
    server.say(Cancel(request_ids=["r"]))
    rig.network.pump()
    assert rig.taker.aborted == []


def test_cancel_aborts_what_is_known_and_ignores_the_rest(rig: Rig):
    server = Server(rig.network)
    server.say(generate())
    server.say(Cancel(request_ids=["unknown", "r"]))
    rig.network.pump()
    assert rig.taker.aborted == [rig.taker.requests[0].request_id]


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(rig: Rig):
    server = Server(rig.network)
    server.say(generate())
    server.say(generate())
    rig.network.pump()
    assert len(rig.taker.requests) == 1
    (refusal,) = server.messages
    assert (refusal.outputs[0].finish_reason, refusal.outputs[0].error_kind) == ("error", ErrorKind.INVALID_REQUEST)


def test_a_refused_request_gets_its_final_message(rig: Rig):
    server = Server(rig.network)
    server.say(generate())
    rig.network.pump()
    rig.link.refuse(rig.taker.requests[0], ErrorKind.INVALID_REQUEST, "too long", "prompt")
    rig.network.pump()
    (message,) = server.messages
    assert (message.outputs[0].error, message.outputs[0].error_kind) == ("too long", ErrorKind.INVALID_REQUEST)
    assert message.outputs[0].error_param == "prompt"


def test_a_server_that_cannot_be_reached_loses_its_requests(rig: Rig):
    server = Server(rig.network)
    server.say(generate())
    rig.network.pump()
    server.links.close()
    rig.link.deliver([output(rig.taker.requests[0], 7)])
    assert rig.taker.aborted == [rig.taker.requests[0].request_id]


def test_a_release_is_handed_on(rig: Rig):
    server = Server(rig.network)
    params = KVTransferParams(remote_engine_id="p@e", remote_request_id="lease")
    server.say(ReleaseKV(kv_transfer_params=params))
    rig.network.pump()
    assert rig.released == [params]


def test_goodbye_reaches_every_server(rig: Rig):
    servers = [Server(rig.network), Server(rig.network)]
    for server in servers:
        server.say(ServerPing(sequence=1))
    rig.network.pump()
    rig.link.say_goodbye("bye")
    rig.network.pump()
    assert [server.messages[-1] for server in servers] == [NodeGoodbye(reason="bye")] * 2


def test_garbage_is_counted_and_dropped(rig: Rig):
    for frames in ([], [memoryview(b"")], [memoryview(b"\x80\x04.")]):
        rig.link.on_message(b"x", frames)
    assert rig.link.num_malformed == 3
