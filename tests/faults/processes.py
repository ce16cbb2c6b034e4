"""Nodes and servers as processes of their own, for what only a process can do: die, stand still, be started again."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from connector.failpoints import ENVIRONMENT
from tests.relay import Relay
from tests.ring import Client, wait_until

START_TIMEOUT = 60.0
MODEL_NAME = "tiny"
"""What fronts call the model that they serve."""
COMMON = ("--dtype", "float32", "--num-blocks", "64", "--block-size", "4", "--num-threads", "1", "--debug-state")
COMMON += ("--remote-prefill-threshold", "0", "--heartbeat-interval", "0.1", "--peer-timeout", "30")
IMPATIENT = ("--peer-timeout", "1.0")
"""For tests whose peers fall silent; elsewhere nobody does, however busy the machine is."""
ANYWHERE = {"--listen": "tcp://127.0.0.1:0", "--kv-listen": "tcp://127.0.0.1:0", "--admin-port": "0"}


@dataclass
class NodeProcess:
    """One `python -m prefill_node`, `decode_node` or `server`. Only its own pid is ever signalled."""

    role: str
    flags: Sequence[str]
    where: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _parent: socket.socket | None = None

    @property
    def module(self) -> str:
        return "server" if self.role == "server" else f"{self.role}_node"

    def start(self, failpoints: str = "") -> None:
        """Returns when it listens; the model may still be loading."""
        self.spawn(failpoints)
        self.wait_until_listening()

    def spawn(self, failpoints: str = "") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.flags, "--parent-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, ENVIRONMENT: failpoints},
            )
        self._parent = ours

    def wait_until_listening(self) -> None:
        assert self._parent is not None
        self._parent.settimeout(START_TIMEOUT)
        with self._parent.makefile("rb") as lines:
            self.where = json.loads(lines.readline())

    def restart(self) -> None:
        """The same node, at the same ports."""
        assert self.process is not None
        assert self.process.wait(10) is not None
        self._close_parent()
        self.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self, timeout: float = 10.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def get(self, path: str) -> Any:
        return httpx.get(self.where["admin_url"] + path).raise_for_status().json()

    def is_ready(self) -> bool:
        return httpx.get(self.where["admin_url"] + "/ready").status_code == 200

    def counter(self, name: str) -> float:
        text = httpx.get(self.where["admin_url"] + "/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))

    def hits(self, point: str) -> int:
        return sum(entry["num_hits"] for entry in self.get("/debug/failpoints") if entry["name"] == point)

    def disarm(self, point: str) -> None:
        httpx.post(self.where["admin_url"] + "/debug/failpoints", json={"disarm": [point]}).raise_for_status()

    def is_at_rest(self) -> bool:
        state = self.get("/debug/state")
        blocks, transfers = state["blocks"], state["transfers"]
        open_transfers = (transfers["outgoing"], transfers.get("incoming"), transfers.get("quarantined"))
        at_rest = blocks["free"] == blocks["total"] and not any(state["queues"].values())
        return at_rest and not transfers["leases"] and not any(open_transfers)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        self._close_parent()

    def _close_parent(self) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None


class Front(NodeProcess):
    """An HTTP server that serves `MODEL_NAME`."""

    @property
    def url(self) -> str:
        return self.where["url"]

    def complete(self, **body: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "prompt": "hello there", "max_tokens": 4, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def status(self, path: str = "/ready") -> int:
        return httpx.get(self.url + path).status_code

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


@dataclass
class ProcessRing:
    prefill: NodeProcess
    decode: NodeProcess
    client: Client

    def wait_until_met(self) -> None:
        wait_until(lambda: self.decode.counter("pdserve_kv_prefill_peers_ready") == 1, "the handshake", START_TIMEOUT)

    def wait_until_at_rest(self, *nodes: NodeProcess) -> None:
        for node in nodes or (self.decode, self.prefill):
            wait_until(node.is_at_rest, f"at rest: {node.get('/debug/state')}")


@contextmanager
def node_process(
    role: str, model: Path, *flags: str, failpoints: str = "", listens: bool = True, **places: str
) -> Iterator[NodeProcess]:
    """A node that listens, or, not to wait for it, one that was only spawned."""
    where = {flag: value for flag, value in ANYWHERE.items() if role == "prefill" or flag != "--kv-listen"}
    where |= {"--" + name.replace("_", "-"): value for name, value in places.items()}
    words = [word for pair in where.items() for word in pair]
    node = NodeProcess(role, ["--model", str(model), *COMMON, *words, *flags])
    try:
        node.spawn(failpoints)
        if listens:
            node.wait_until_listening()
        yield node
    finally:
        node.close()


@contextmanager
def front_process(model: Path, *flags: str, is_ready: bool = True) -> Iterator[Front]:
    """A server in front of the nodes that `flags` name; by default only once it is ready."""
    words = ["--model", str(model), "--served-model-name", MODEL_NAME, "--port", "0", "--heartbeat-interval", "0.1"]
    front = Front("server", [*words, *flags])
    try:
        front.start()
        if is_ready:
            wait_until(lambda: front.status() == 200, "the server is ready", START_TIMEOUT)
        yield front
    finally:
        front.close()


@contextmanager
def process_ring(
    model: Path,
    *flags: str,
    prefill_failpoints: str = "",
    kv_address: str | None = None,
    relay: Relay | None = None,
) -> Iterator[ProcessRing]:
    """A prefill node at ports of its own, so that it can be started again, a decode node that dials it (or
    `kv_address`), and a client of the decode node."""
    kv_port, port, admin_port = free_ports(3)
    at = {"listen": f"tcp://127.0.0.1:{port}", "kv_listen": f"tcp://127.0.0.1:{kv_port}", "admin_port": str(admin_port)}
    with ExitStack() as stack:
        prefill = stack.enter_context(
            node_process("prefill", model, "--name", "p0", *flags, failpoints=prefill_failpoints, listens=False, **at)
        )
        if relay is not None:
            relay.target = at["kv_listen"]
        decode = stack.enter_context(node_process("decode", model, "--prefill", kv_address or at["kv_listen"], *flags))
        prefill.wait_until_listening()
        client = Client(decode.where["address"])
        stack.callback(client.close)
        ring = ProcessRing(prefill, decode, client)
        ring.wait_until_met()
        yield ring


def free_ports(count: int) -> list[int]:
    """Free at this moment, and taken at once by whoever asked.

    Below the range from which a system serves those that name no port: who dials a port of that range again and again
    while nobody listens may be given that very port for its own end, and is then connected to itself.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [] if port in ports else [port]
    return ports
