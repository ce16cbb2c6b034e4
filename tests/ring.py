"""A ring inside the test's own process: real nodes, real links, one thread for each engine loop."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmq.utils.garbage import GarbageCollectorThread

from connector.codec import PROTOCOL_VERSION, encode
from connector.node import Node, NodeAddresses
from connector.node_config import NodeConfig
from connector.node_debug import debug_state
from connector.server_messages import Cancel, Generate, ServerHello, ServerPing, TokenOutput, Tokens, decode_from_node
from connector.transfer_settings import TransferSettings
from connector.zmq_link import ZmqLinks
from engine.config import CacheConfig, ModelOptions, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.relay import Relay

TIMEOUT = 60.0


@dataclass
class Answer:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def final(self) -> TokenOutput:
        assert self.finished.wait(TIMEOUT), f"no final message after {TIMEOUT} s; {len(self.outputs)} outputs"
        return self.outputs[-1]


class Client:
    """Speaks the server's end of the node link."""

    def __init__(self, address: str) -> None:
        self.answers: dict[str, Answer] = {}
        self.unexpected: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._links = ZmqLinks("client")
        self._node = self._links.dial(address, self)
        self._node.send([encode(ServerHello(protocol_version=PROTOCOL_VERSION))])
        self._links.every(0.1, lambda: self._node.send([encode(ServerPing(sequence=0))]))
        self._count = 0

    def start(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> tuple[str, Answer]:
        self._count += 1
        request_id = f"request-{self._count}"
        answer = self.answers[request_id] = Answer()
        message = Generate(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, **fields)
        self._node.send([encode(message)])
        return request_id, answer

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> Answer:
        _, answer = self.start(prompt, sampling, **fields)
        assert answer.final.finish_reason != "error", answer.final.error
        return answer

    def cancel(self, *request_ids: str) -> None:
        self._node.send([encode(Cancel(request_ids=list(request_ids)))])

    def on_message(self, peer: bytes, frames: Sequence[memoryview]) -> None:
        message = decode_from_node.decode(frames[0])
        if isinstance(message, Tokens):
            for output in message.outputs:
                self._take(output)

    def _take(self, output: TokenOutput) -> None:
        answer = self.answers.get(output.request_id)
        if answer is None or answer.finished.is_set():
            self.unexpected.put(output)
            return
        answer.outputs.append(output)
        answer.token_ids += [token.token_id for token in output.tokens]
        if output.finish_reason is not None:
            answer.finished.set()

    def on_up(self, peer: bytes) -> None:
        pass

    def on_down(self, peer: bytes) -> None:
        pass

    def close(self) -> None:
        self._links.close()
        assert self.unexpected.empty(), f"unexpected: {self.unexpected.get()}"


class RunningNode:
    """A node and the thread that runs it."""

    def __init__(self, role: str, config: NodeConfig, addresses: NodeAddresses) -> None:
        self.node = Node(role, config, addresses)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{role}-loop")
        self._thread.start()
        assert self.node.loaded.wait(TIMEOUT)

    def _run(self) -> None:
        try:
            self.node.run()
        except BaseException as error:  # shown by `close`, in the test's own thread
            self.failure = error
        finally:
            self.node.loaded.set()

    def state(self) -> dict[str, Any]:
        return dict(debug_state(self.node.parts))

    @property
    def engine(self):
        return self.node.parts.engine

    @property
    def worker(self):
        return self.node.parts.worker

    def is_quiescent(self) -> bool:
        state = self.state()
        blocks, transfers = state["blocks"], state["transfers"]
        at_rest = blocks["free"] == blocks["total"] and not blocks["pinned"] and not any(state["queues"].values())
        open_transfers = (
            transfers["outgoing"],
            transfers.get("incoming"),
            transfers.get("quarantined"),
            transfers["leases"],
        )
        return at_rest and not any(open_transfers)

    def close(self) -> None:
        """May be called twice. Lets go of the node: its memory is unmapped when nobody looks at it any more."""
        if self.node is None:
            return
        self.node.stop()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        self.node.close()
        self.node = None
        if self.failure is not None:
            raise self.failure


def wait_until(holds, what: str, timeout: float = 10.0) -> None:
    """Looks again every few milliseconds, for what no event tells; fails after `timeout`."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        pause.wait(0.005)


def node_config(model: Path, **settings: Any) -> NodeConfig:
    """Fields of all the nested configs by name."""

    def of(kind: type) -> dict[str, Any]:
        return {name: settings.pop(name) for name in list(settings) if name in kind.__dataclass_fields__}

    config = NodeConfig(
        model=ModelOptions(model=str(model), **{"dtype": "float32"} | of(ModelOptions)),
        cache=CacheConfig(**{"num_blocks": 64, "block_size": 4} | of(CacheConfig)),
        scheduler=SchedulerConfig(**of(SchedulerConfig)),
        transfer=TransferSettings(
            **{"heartbeat_interval": 0.1, "peer_timeout": 30.0, "remote_prefill_threshold": 0} | of(TransferSettings)
        ),
        num_threads=1,
        **{"drain_timeout": 0.0} | settings,
    )
    return config


@dataclass
class Ring:
    """One prefill node, one decode node, one client of the decode node."""

    prefill: RunningNode
    decode: RunningNode
    client: Client

    def wait_until_quiescent(self) -> None:
        for node in (self.decode, self.prefill):
            wait_until(node.is_quiescent, f"at rest: {node.state()}")


@contextmanager
def running_node(role: str, config: NodeConfig, **addresses: Any) -> Iterator[RunningNode]:
    place = NodeAddresses(**{"listen": "tcp://127.0.0.1:0", "admin_port": 0} | addresses)
    node = RunningNode(role, config, place)
    try:
        yield node
    finally:
        node.close()


@contextmanager
def running_client(node: RunningNode) -> Iterator[Client]:
    client = Client(node.node.where["address"])
    try:
        yield client
    finally:
        client.close()


@contextmanager
def running_ring(
    model: Path,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    relay: Relay | None = None,
    **both: Any,
) -> Iterator[Ring]:
    """Ends with both nodes at rest and no thread left. KV goes through `relay` if there is one."""
    threads_before = set(threading.enumerate())
    with ExitStack() as stack:
        config = node_config(model, **both | (prefill or {}))
        prefill_node = stack.enter_context(running_node("prefill", config, kv_listen="tcp://127.0.0.1:0"))
        kv_address = prefill_node.node.where["kv_address"]
        if relay is not None:
            relay.target, kv_address = kv_address, relay.address
        config = node_config(model, **both | (decode or {}))
        decode_node = stack.enter_context(running_node("decode", config, prefill=(kv_address,)))
        client = stack.enter_context(running_client(decode_node))
        wait_until(decode_node.worker.receiver.ready_peers, "the handshake")
        ring = Ring(prefill_node, decode_node, client)
        yield ring
        ring.wait_until_quiescent()
    # pyzmq keeps one thread for the whole process, which frees buffers of zero-copy sends.
    new = {thread for thread in threading.enumerate() if not isinstance(thread, GarbageCollectorThread)}
    left = [repr(thread) for thread in new - threads_before if thread.is_alive()]
    assert not left, f"threads left: {left}"
