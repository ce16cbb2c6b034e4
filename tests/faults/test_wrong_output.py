"""The worst kind: a wrong answer that looks right. Every block is poisoned when it is handed out or given up."""

import threading
from pathlib import Path

import pytest
import torch

from tests.faults.rig import (
    GREEDY,
    LONG,
    assert_right,
    assert_serves,
    fault_ring,
    make_prompt,
    stopped_at,
    wait_until_hit,
)
from tests.oracle import Oracle
from tests.ring import Ring, wait_until


def test_blocks_of_an_aborted_load_are_not_used_again_while_they_are_written(tiny_llama: Path, oracle: Oracle):
    """Shared memory; the pool is so small that the next request needs those blocks."""
    with fault_ring(tiny_llama, transport="shm", decode={"num_blocks": 8}) as ring:
        with stopped_at("prefill.before_send.layer1") as point:
            request_id, answer = ring.client.start(make_prompt(20, seed=1), LONG)
            wait_until_hit(point)
            ring.client.cancel(request_id)
            assert answer.final.finish_reason == "abort"
            prompt = make_prompt(17, seed=2)
            _, waiting = ring.client.start(prompt, GREEDY)
            wait_until(lambda: ring.decode.engine.scheduler.num_waiting == 1, "no room: the blocks are pinned")
            assert ring.decode.state()["blocks"]["pinned"] == 5
        assert_right(waiting, oracle, prompt)


def test_a_late_write_lands_in_blocks_that_nobody_else_has(ring: Ring, oracle: Oracle):
    """Aborted in mid-transfer, fifty times, while others use the pool: every answer is right."""
    for round_number in range(50):
        request_id, answer = ring.client.start(make_prompt(18, seed=100 + round_number), LONG)
        prompt = make_prompt(3 + round_number % 16, seed=200 + round_number)
        _, other = ring.client.start(prompt, GREEDY)
        ring.client.cancel(request_id)
        assert_right(other, oracle, prompt)
        assert answer.final.finish_reason == "abort"


@pytest.mark.parametrize("load_mode", ["async", "sync"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("company", [0, 3], ids=["alone", "in a mixed batch"])
def test_one_bad_layer(tiny_llama: Path, oracle: Oracle, load_mode: str, layer: int, company: int):
    prompts = [make_prompt(17, seed=300 + i) for i in range(company + 1)]
    settings = {"transport": "zmq", "load_mode": load_mode, "long_prefill_token_threshold": 6}
    with fault_ring(tiny_llama, **settings) as ring:
        receiver = ring.decode.worker.receiver
        check, spoilt = receiver._intake.check, threading.Event()

        def spoil_one(transfer, unit, payload):
            if unit.layer == layer and unit.start >= 6 and not spoilt.is_set():
                spoilt.set()
                torch.frombuffer(payload[0], dtype=torch.uint8)[3] ^= 1
            return check(transfer, unit, payload)

        receiver._intake.check = spoil_one
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, oracle, prompt)
        assert spoilt.is_set()
        assert receiver.counters.num_digest_mismatches == 1
        counters = ring.decode.engine.scheduler.counters
        assert counters.num_loads_recomputed == 1
        assert 0 < counters.recomputed_tokens <= 11, "the first chunk was good"
        del receiver._intake.check


@pytest.mark.parametrize("load_mode", ["async", "sync"])
@pytest.mark.parametrize("missing", [1, 4, 9])
def test_a_transfer_that_covers_fewer_tokens_than_was_granted(
    tiny_llama: Path, oracle: Oracle, transport: str, load_mode: str, missing: int
):
    prompt = make_prompt(17, seed=320)
    with fault_ring(tiny_llama, transport=transport, load_mode=load_mode) as ring:
        sender = ring.prefill.worker.sender
        save = sender.save
        sender.save = lambda request_id, layer, span, ids: save(
            request_id, layer, range(span.start, span.stop - missing), ids
        )
        _, answer = ring.client.start(prompt, GREEDY)
        assert_right(answer, oracle, prompt)
        assert ring.decode.engine.scheduler.counters.recomputed_tokens == missing
        del sender.save
        assert_serves(ring, oracle) if load_mode == "async" else None


@pytest.mark.parametrize("transport", ["zmq"])
def test_a_transfer_that_covers_more_than_was_granted_fails_alone(tiny_llama: Path, oracle: Oracle, transport: str):
    prompt = make_prompt(14, seed=330)
    with fault_ring(tiny_llama, transport=transport) as ring:
        sender = ring.prefill.worker.sender
        save = sender.save
        sender.save = lambda request_id, layer, span, ids: save(
            request_id, layer, range(span.start, span.stop + 1), ids
        )
        _, answer = ring.client.start(prompt, GREEDY)
        assert_right(answer, oracle, prompt)
        assert ring.decode.worker.receiver.counters.num_transfers_failed == 1
        del sender.save


def test_a_prefill_of_nothing_new_ships_what_was_asked_for(ring: Ring, oracle: Oracle):
    """The prefill node has the whole prompt cached; the decode node, after salting, has nothing."""
    prompt = make_prompt(21, seed=340)
    for salt in ("", "a", "a"):
        answer = ring.client.start(prompt, GREEDY, cache_salt=salt)[1]
        assert_right(answer, oracle, prompt)
