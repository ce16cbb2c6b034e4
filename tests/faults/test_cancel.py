"""Cancel and leak: whatever the moment, both pools are full again within a second and without new traffic."""

from pathlib import Path

import pytest

from connector import failpoints
from engine.sampling_params import SamplingParams
from tests.faults.rig import (
    GREEDY,
    IMPATIENT,
    LONG,
    QUICK,
    STRICT,
    assert_at_rest_soon,
    assert_right,
    assert_serves,
    fault_ring,
    make_prompt,
    stopped_at,
    wait_until_hit,
)
from tests.oracle import Oracle
from tests.relay import running_relay
from tests.ring import Ring, wait_until

STAGES = [
    "decode.after_alloc",
    "prefill.on_grant",
    "prefill.before_send.layer0",
    "prefill.before_send.layer1",
    "prefill.after_send.layer1",
    "prefill.before_send.layer2",
    "prefill.before_first_token",
    "prefill.before_done",
    "decode.on_unit",
    "decode.on_first_token",
    "decode.on_done",
]


@pytest.mark.parametrize("stage", STAGES)
def test_cancel_at_each_stage(ring: Ring, oracle: Oracle, stage: str):
    with stopped_at(stage) as point:
        request_id, answer = ring.client.start(make_prompt(13, seed=STAGES.index(stage)), LONG)
        wait_until_hit(point)
        ring.client.cancel(request_id)
        if stage != "decode.after_alloc":
            # The engine's own thread stands at that one; everywhere else the client hears at once.
            assert answer.final.finish_reason == "abort"
    assert answer.final.finish_reason == "abort"
    assert_at_rest_soon(ring)
    assert_serves(ring, oracle)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_cancel_in_mid_stream(ring: Ring, oracle: Oracle, num_tokens: int):
    prompt = make_prompt(13, seed=20 + num_tokens)
    request_id, answer = ring.client.start(prompt, LONG)
    wait_until(lambda: len(answer.token_ids) >= num_tokens, "some tokens")
    ring.client.cancel(request_id)
    assert answer.final.finish_reason == "abort"
    assert answer.token_ids == oracle.greedy(prompt, LONG.max_tokens)[: len(answer.token_ids)]
    assert_at_rest_soon(ring)


def test_cancel_while_queued_behind_a_full_engine(tiny_llama: Path, oracle: Oracle, transport: str):
    prompts = [make_prompt(13, seed=seed) for seed in (4, 5)]
    with fault_ring(tiny_llama, transport=transport, decode={"max_num_seqs": 1}) as ring:
        with stopped_at("prefill.before_send.layer0") as point:
            _, first = ring.client.start(prompts[0], GREEDY)
            wait_until_hit(point)
            request_id, second = ring.client.start(prompts[1], GREEDY)
            wait_until(lambda: ring.decode.engine.scheduler.num_waiting == 1, "one queued")
            ring.client.cancel(request_id)
            assert second.final.finish_reason == "abort"
        assert_right(first, oracle, prompts[0])
        assert ring.prefill.engine.scheduler.counters.prompt_tokens_computed == len(prompts[0])
        assert_at_rest_soon(ring)


def test_fifty_cancels_during_a_throttled_transfer(tiny_llama: Path, oracle: Oracle):
    settings = {"transport": "zmq", "num_blocks": 16, "credit_bytes": 4096, "max_model_len": 64, **QUICK}
    with running_relay(bytes_per_second=100e3) as relay, fault_ring(tiny_llama, relay=relay, **settings) as ring:
        for number in range(50):
            request_id, answer = ring.client.start(make_prompt(40, seed=10 + number), GREEDY)
            num_units = ring.prefill.worker.sender.counters.num_units
            if number % 3:
                wait_until(lambda n=num_units: ring.prefill.worker.sender.counters.num_units > n, "KV under way")
            ring.client.cancel(request_id)
            assert answer.final.finish_reason == "abort"
        relay.bytes_per_second = None
        wait_until(ring.decode.is_quiescent, f"at rest: {ring.decode.state()}")
        wait_until(ring.prefill.is_quiescent, f"at rest: {ring.prefill.state()}")
        assert_serves(ring, oracle)


def test_an_aborted_load_whose_acknowledgement_is_lost(ring: Ring, oracle: Oracle):
    """The next heartbeat asks for it, and hears that nothing of it will come."""
    failpoints.arm("prefill.before_closed=drop*1")
    with stopped_at("prefill.before_send.layer1") as point:
        request_id, answer = ring.client.start(make_prompt(13, seed=70), GREEDY)
        wait_until_hit(point)
        ring.client.cancel(request_id)
        assert answer.final.finish_reason == "abort"
    assert_at_rest_soon(ring)
    assert_serves(ring, oracle)


@pytest.mark.parametrize("lost", ["decode.before_cancel", "prefill.on_cancel"])
def test_an_abort_that_the_prefill_node_never_hears(ring: Ring, oracle: Oracle, lost: str):
    """The list of what is wanted, in each heartbeat, ends it all the same; until then a writer's blocks stay pinned."""
    failpoints.arm(f"{lost}=drop*1")
    with stopped_at("prefill.before_send.layer1") as point:
        request_id, answer = ring.client.start(make_prompt(13, seed=72), GREEDY)
        wait_until_hit(point)
        ring.client.cancel(request_id)
        assert answer.final.finish_reason == "abort"
        is_shared = ring.decode.worker.receiver.peers[0].transport == "shm"
        assert ring.decode.state()["blocks"]["pinned"] == (4 if is_shared else 0)
    assert_at_rest_soon(ring)
    assert_serves(ring, oracle)


def test_a_load_that_is_aborted_while_the_prefill_node_is_silent(tiny_llama: Path, oracle: Oracle):
    with running_relay() as relay, fault_ring(tiny_llama, relay=relay, transport="zmq", **IMPATIENT) as ring:
        with stopped_at("prefill.before_send.layer1") as point:
            request_id, answer = ring.client.start(make_prompt(13, seed=74), GREEDY)
            wait_until_hit(point)
            relay.swallow = True
            ring.client.cancel(request_id)
            assert answer.final.finish_reason == "abort"
            wait_until(ring.decode.is_quiescent, "the decode node needs no answer", 1.0)
        wait_until(ring.prefill.is_quiescent, "the prefill node gives the silent decode node up", 2.0)
        wait_until(lambda: not ring.decode.worker.receiver.ready_peers(), "the prefill node is given up, too")
        relay.swallow = False
        relay.cut()
        wait_until(ring.decode.worker.receiver.ready_peers, "the handshake again")
        assert_serves(ring, oracle)


def test_the_decode_node_cannot_be_reached_after_prefill_started(tiny_llama: Path, oracle: Oracle, transport: str):
    settings = {"transport": transport, **IMPATIENT, **STRICT}
    with running_relay() as relay, fault_ring(tiny_llama, relay=relay, **settings) as ring:
        with stopped_at("prefill.before_send.layer0") as point:
            _, answer = ring.client.start(make_prompt(13, seed=76), GREEDY)
            wait_until_hit(point)
            relay.swallow = True
            wait_until(lambda: not ring.prefill.worker.sender.peer_names, "the decode node is given up")
        assert answer.final.finish_reason == "error"
        wait_until(ring.prefill.is_quiescent, f"at rest: {ring.prefill.state()}", 1.0)
        wait_until(lambda: not ring.decode.worker.receiver.ready_peers(), "the prefill node is given up, too")
        relay.swallow = False
        relay.cut()
        wait_until(ring.decode.worker.receiver.ready_peers, "the handshake again")
        assert_serves(ring, oracle)


def test_a_prefill_that_fails_and_whose_failure_is_lost(tiny_llama: Path, oracle: Oracle, transport: str):
    """The prompt does not fit the prefill node; the decode node finds out by asking, and computes it itself."""
    prompt = make_prompt(30, seed=78)
    with fault_ring(tiny_llama, transport=transport, prefill={"num_blocks": 4}, **QUICK) as ring:
        failpoints.arm("prefill.before_closed=drop*1")
        assert_right(ring.client.start(prompt, GREEDY)[1], oracle, prompt)
        assert ring.decode.engine.scheduler.counters.num_loads_recomputed == 1
        assert_at_rest_soon(ring)


def test_preempted_then_aborted(tiny_llama: Path, transport: str):
    small = {"num_blocks": 8, "watermark_blocks": 0, "enable_prefix_caching": False}
    with fault_ring(tiny_llama, transport=transport, decode=small) as ring:
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        started = [ring.client.start(make_prompt(8, seed=80 + i), sampling) for i in range(3)]
        scheduler = ring.decode.engine.scheduler
        wait_until(lambda: scheduler.counters.num_preemptions > 0, "a preemption")
        ring.client.cancel(*(request_id for request_id, _ in started))
        assert all(answer.final.finish_reason in ("abort", "length") for _, answer in started)
        assert_at_rest_soon(ring)
