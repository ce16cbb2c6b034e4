"""A decode and a prefill node behind one server, and the two legs' `kv_transfer_params` to send it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from connector.kv_transfer_params import KVTransferParams
from tests.server_rig import FakeNode, RunningServer, answers, running_server, write_model_directory

PATHS = ("/v1/completions", "/v1/chat/completions")
LEASES = (f"lease-{number}" for number in count())

HANDED_OUT = KVTransferParams(
    do_remote_prefill=True,
    do_remote_decode=False,
    remote_engine_id="d0@e0",
    remote_request_id="lease",
    remote_block_ids=[[3, 4]],
    remote_host="127.0.0.1",
    remote_port=0,
    remote_num_tokens=8,
    remote_blocks_expiry_time=12.5,
)
"""What a node says of KV that it holds."""


@dataclass(slots=True)
class Ring:
    """A decode node that answers, a prefill node that holds KV, a server in front."""

    decode: FakeNode
    prefill: FakeNode
    server: RunningServer

    def post(self, path: str, **body: Any) -> httpx.Response:
        content = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
        return self.server.client.post(path, json=content | body)

    def sent(self) -> KVTransferParams | None:
        """What the one request sent since the last call had with it."""
        (generate,) = self.decode.generates
        self.decode.generates.clear()
        return generate.kv_transfer_params

    def reset(self) -> "Ring":
        for node in (self.decode, self.prefill):
            node.generates.clear()
            node.cancelled.clear()
            node.released.clear()
        self.decode.script = answers([65])
        return self


@contextmanager
def running_ring(directory: Path) -> Iterator[Ring]:
    decode, prefill = FakeNode(), FakeNode("prefill", "p0")
    decode.ready_peers = ["p0"]
    with running_server(write_model_directory(directory), [decode.address], [prefill.address]) as server:
        server.wait_ready()
        yield Ring(decode, prefill, server)
    decode.close()
    prefill.close()


def held(**changes: Any) -> dict[str, Any]:
    """What a prefill node's response says, for one more lease."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0@e0",
        "remote_request_id": next(LEASES),
        "remote_block_ids": [[1, 2]],
        "remote_host": "203.0.113.1",
        "remote_port": 5600,
        "remote_num_tokens": 8,
        "remote_blocks_expiry_time": 1.5,
    } | changes


def error_of(reply: httpx.Response) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["param"]
