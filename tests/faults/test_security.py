"""Whatever arrives on a socket: an error or a drop, never a crash; and identity does not depend on the process."""

import os
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path

import zmq

from connector.codec import PROTOCOL_VERSION, encode
from connector.peer_messages import PeerHello, PeerPing, Prefill
from connector.server_messages import Generate, ServerHello
from engine.sampling_params import SamplingParams
from tests.faults.rig import QUICK, assert_serves, fault_ring
from tests.oracle import Oracle
from tests.ring import wait_until


def rubbish(seed: int) -> list[list[bytes]]:
    """Messages of several frames: pickles, noise, cut and swollen real ones."""
    rng = random.Random(seed)
    real = [
        encode(ServerHello(protocol_version=PROTOCOL_VERSION)),
        encode(Generate(request_id="x", prompt_token_ids=[1], sampling=SamplingParams())),
        encode(PeerPing(sequence=1)),
    ]
    cut = [[message[: rng.randrange(1, len(message))]] for message in real for _ in range(10)]
    swollen = [[message + rng.randbytes(rng.randrange(1, 64))] for message in real for _ in range(10)]
    noise = [[rng.randbytes(rng.randrange(0, 300)) for _ in range(rng.randrange(0, 5))] for _ in range(60)]
    return [*cut, *swollen, *noise, [pickle.dumps({"a": [1]})], [b""], [b"", b"", b""]]


def test_rubbish_on_every_socket(tiny_llama: Path, oracle: Oracle, transport: str):
    with fault_ring(tiny_llama, transport=transport, **QUICK) as ring:
        addresses = [ring.decode.node.where["address"], ring.prefill.node.where["address"]]
        addresses.append(ring.prefill.node.where["kv_address"])
        context = zmq.Context()
        for seed, address in enumerate(addresses):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 2000)
                dealer.connect(address)
                for frames in rubbish(seed):
                    dealer.send_multipart(frames or [b""])
            host, port = address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(random.Random(seed).randbytes(4096))
        context.term()
        wait_until(lambda: ring.prefill.worker.sender.num_malformed > 50, "counted on the KV link")
        wait_until(lambda: ring.decode.node._server_link.num_malformed > 50, "counted on the server link")
        assert_serves(ring, oracle)


def test_nothing_is_granted_before_a_handshake(tiny_llama: Path, oracle: Oracle):
    with fault_ring(tiny_llama, **QUICK) as ring:
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 2000)
            dealer.connect(ring.prefill.node.where["kv_address"])
            grant = Prefill(
                transfer_id="mine",
                prompt_token_ids=[1, 2, 3],
                wants_first_token=True,
                sampling=SamplingParams(),
                start=0,
                end=3,
                block_ids=[0],
            )
            other = ring.decode.worker.receiver.peers._hello
            hello = PeerHello(**{n: getattr(other, n) for n in other.__struct_fields__} | {"protocol_version": 99})
            for message in (grant, hello, grant):
                dealer.send(encode(message))
            wait_until(lambda: ring.prefill.worker.sender.num_refused == 1, "refused")
        context.term()
        assert ring.prefill.engine.scheduler.counters.prompt_tokens_computed == 0
        assert_serves(ring, oracle)


def test_block_hashes_do_not_depend_on_the_process():
    code = (
        "from engine.block_hash import *\n"
        "hashes = []\n"
        "extend_block_hashes(hashes, root_hash('model', 'salt'), list(range(64)), 16)\n"
        "print([h.hex() for h in hashes])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 4 * 64
