"""Deadlock and starvation: small pools, many requests, and a prefill that always fails."""

from pathlib import Path

import pytest

from engine.errors import ErrorKind
from tests.faults.rig import GREEDY, QUICK, STRICT, assert_right, fault_ring, make_prompt
from tests.oracle import Oracle
from tests.ring import wait_until


def test_a_pool_for_two_prompts_and_six_requests(tiny_llama: Path, oracle: Oracle, transport: str):
    prompts = [make_prompt(15, seed=400 + i) for i in range(6)]
    small = {"num_blocks": 12, "watermark_blocks": 0}
    with fault_ring(tiny_llama, transport=transport, prefill=small, decode=small) as ring:
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, oracle, prompt)


def test_chunked_prompts_on_both_nodes_do_not_wait_for_each_other(tiny_llama: Path, oracle: Oracle, transport: str):
    """Each prompt nearly fills either pool; whoever is admitted has all its blocks."""
    prompts = [make_prompt(29, seed=410 + i) for i in range(4)]
    small = {"num_blocks": 10, "watermark_blocks": 0}
    settings = {"transport": transport, "long_prefill_token_threshold": 5}
    with fault_ring(tiny_llama, prefill=small, decode=small, **settings) as ring:
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, oracle, prompt)


def test_two_hundred_at_once_on_a_small_pool(tiny_llama: Path, oracle: Oracle, transport: str):
    """Time in a queue is not transfer time: nobody runs into the deadline, though most wait far longer than it."""
    prompts = [make_prompt(1 + i % 23, seed=420 + i % 40) for i in range(200)]
    settings = {"transport": transport, "transfer_timeout": 0.5, "heartbeat_interval": 0.05}
    with fault_ring(tiny_llama, decode={"num_blocks": 40}, prefill={"num_blocks": 16}, **settings) as ring:
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, oracle, prompt)
        assert ring.decode.worker.receiver.counters.num_transfers_failed == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefill_that_always_fails_with_no_other_traffic(tiny_llama: Path, oracle: Oracle, policy: str):
    prompt = make_prompt(17, seed=430)
    settings = QUICK | (STRICT if policy == "fail" else {})
    with fault_ring(tiny_llama, prefill={"num_blocks": 4}, **settings) as ring:
        _, answer = ring.client.start(prompt, GREEDY)
        if policy == "fail":
            assert answer.final.error_kind is ErrorKind.INVALID_REQUEST
        else:
            assert_right(answer, oracle, prompt)
            assert ring.decode.engine.scheduler.counters.num_loads_recomputed == 1


def test_a_preempted_request_does_not_ask_for_its_transfer_again(tiny_llama: Path, oracle: Oracle, transport: str):
    prompts = [make_prompt(9 + i, seed=440 + i) for i in range(5)]
    with fault_ring(tiny_llama, transport=transport, decode={"num_blocks": 12, "watermark_blocks": 0}) as ring:
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, oracle, prompt)
        assert ring.decode.engine.scheduler.counters.num_preemptions > 0
        assert ring.prefill.worker.sender.counters.num_transfers_sent == len(prompts)


def test_an_idle_node_frees_what_was_held_for_nobody(tiny_llama: Path):
    """No traffic at all after the first leg: the lease ends by itself."""
    from connector.kv_transfer_params import KVTransferParams
    from tests.ring import running_client

    with fault_ring(tiny_llama, lease_seconds=0.2, **QUICK) as ring, running_client(ring.prefill) as client:
        client.generate(make_prompt(17, seed=450), GREEDY, kv_transfer_params=KVTransferParams(do_remote_decode=True))
        assert ring.prefill.state()["blocks"]["pinned"] > 0
        wait_until(ring.prefill.is_quiescent, f"reclaimed: {ring.prefill.state()}", 2.0)


def test_idle_engines_do_not_step(tiny_llama: Path):
    with fault_ring(tiny_llama, **QUICK) as ring:
        ring.client.generate(make_prompt(9, seed=451), GREEDY)
        ring.wait_until_quiescent()
        beats = ring.decode.worker.receiver.peers[0]._sequence
        steps = [node.engine.scheduler.counters.num_steps for node in (ring.decode, ring.prefill)]
        wait_until(lambda: ring.decode.worker.receiver.peers[0]._sequence > beats + 5, "some heartbeats")
        assert [node.engine.scheduler.counters.num_steps for node in (ring.decode, ring.prefill)] == steps
