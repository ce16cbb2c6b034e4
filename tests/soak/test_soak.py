"""Many short requests with shared prefixes, clients that leave, prefill nodes that are killed and come back.

`make soak` runs 1,000 requests and 10 kills; the tests run a tenth of that. Every answer equals the oracle's, and
afterwards nothing has grown on the decode node, which lived through all of it.
"""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.faults.processes import START_TIMEOUT, NodeProcess, free_ports, node_process
from tests.oracle import Oracle
from tests.ring import Answer, Client, wait_until
from tests.tiny_models import save_tiny_model

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "100"))
NUM_KILLS = max(2, NUM_REQUESTS // 100)
CONCURRENCY = 12
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
MAX_GROWTH_BYTES = 64 << 20
"""Allocators keep some; a leak of KV or of messages would be far more over a thousand requests."""


class Soak:
    """Keeps `CONCURRENCY` requests going, and checks each as it ends."""

    def __init__(self, client: Client, oracle: Oracle, seed: int) -> None:
        self.client, self.oracle = client, oracle
        self.rng = random.Random(seed)
        prefixes = [self.rng.choices(range(290), k=length) for length in (0, 4, 12, 24, 40)]
        tails = [self.rng.choices(range(290), k=length) for length in (1, 2, 5, 9, 16, 23)]
        self.prompts = [prefix + tail for prefix in prefixes for tail in tails]
        self.open: dict[str, tuple[list[int], Answer, int | None]] = {}
        self.num_aborted = self.num_right = 0

    def start_one(self) -> None:
        prompt = self.rng.choice(self.prompts)
        request_id, answer = self.client.start(prompt, GREEDY)
        leaves_after = self.rng.randrange(0, NUM_TOKENS) if self.rng.random() < 0.2 else None
        self.open[request_id] = (prompt, answer, leaves_after)

    def look(self) -> None:
        """Lets go those who leave, checks those who have ended."""
        for request_id, (prompt, answer, leaves_after) in list(self.open.items()):
            if leaves_after is not None and len(answer.token_ids) >= leaves_after:
                self.client.cancel(request_id)
                self.open[request_id] = (prompt, answer, None)
            if answer.finished.is_set():
                del self.open[request_id]
                self._check(prompt, answer)

    def _check(self, prompt: list[int], answer: Answer) -> None:
        expected = self.oracle.greedy(prompt, NUM_TOKENS)
        assert answer.token_ids == expected[: len(answer.token_ids)]
        assert answer.final.finish_reason in ("length", "abort"), answer.final.error
        self.num_aborted += answer.final.finish_reason == "abort"
        self.num_right += len(answer.token_ids) == NUM_TOKENS


def usage_of(node: NodeProcess) -> tuple[int, int, int]:
    """(resident bytes, threads, open files)."""
    assert node.process is not None
    process = psutil.Process(node.process.pid)
    return process.memory_info().rss, process.num_threads(), process.num_fds()


def start_nodes(stack: ExitStack, model: Path) -> tuple[list[NodeProcess], NodeProcess]:
    prefill = []
    for index in range(2):
        kv_port, port, admin_port = free_ports(3)
        at = {"listen": f"tcp://127.0.0.1:{port}", "kv_listen": f"tcp://127.0.0.1:{kv_port}"}
        node = node_process("prefill", model, "--name", f"p{index}", admin_port=str(admin_port), **at)
        prefill.append(stack.enter_context(node))
    dials = [word for node in prefill for word in ("--prefill", node.where["kv_address"])]
    decode = stack.enter_context(node_process("decode", model, *dials))
    wait_until(lambda: decode.counter("pdserve_kv_prefill_peers_ready") == 2, "both handshakes", START_TIMEOUT)
    return prefill, decode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.mark.timeout(300)
def test_soak(model: Path):
    with ExitStack() as stack:
        prefill, decode = start_nodes(stack, model)
        client = Client(decode.where["address"])
        stack.callback(client.close)
        soak = Soak(client, Oracle(model), seed=NUM_REQUESTS)
        kills_at = {(i + 1) * NUM_REQUESTS // (NUM_KILLS + 1) for i in range(NUM_KILLS)}
        victim, before = None, None
        for number in range(NUM_REQUESTS):
            wait_until(lambda: soak.look() or len(soak.open) < CONCURRENCY, "a place", 60)
            soak.start_one()
            if number == NUM_REQUESTS // 5:
                before = usage_of(decode)
            if number in kills_at:
                if victim is not None:
                    victim.restart()
                victim = prefill[soak.rng.randrange(2)]
                victim.kill()
        wait_until(lambda: soak.look() or not soak.open, "the last answers", 60)
        if victim is not None:
            victim.restart()
        wait_until(lambda: decode.counter("pdserve_kv_prefill_peers_ready") == 2, "healed", START_TIMEOUT)
        for node in (decode, *prefill):
            wait_until(node.is_at_rest, f"at rest: {node.get('/debug/state')}")
        after = usage_of(decode)
        assert soak.num_right + soak.num_aborted >= NUM_REQUESTS
        assert NUM_REQUESTS // 20 < soak.num_aborted < NUM_REQUESTS // 3
        assert before is not None
        assert after[0] - before[0] < MAX_GROWTH_BYTES
        assert after[1] <= before[1] + 1
        assert after[2] <= before[2] + 4
        recovered = [decode.counter(f"pdserve_kv_{name}_total") for name in ("next_candidates", "loads_recomputed")]
        print(f"{soak.num_right} right, {soak.num_aborted} left, {NUM_KILLS} kills, recovered {recovered}")
