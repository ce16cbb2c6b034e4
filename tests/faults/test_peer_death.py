"""A peer dies, stands still, is restarted or is stale. Bounded answers always, right answers, and a ring that heals."""

import signal
from pathlib import Path

import pytest

from engine.errors import ErrorKind
from tests.faults.processes import IMPATIENT, ProcessRing, front_process, process_ring
from tests.faults.rig import GREEDY, LONG, assert_right, make_prompt
from tests.oracle import Oracle
from tests.relay import running_relay
from tests.ring import wait_until

STRICT_FLAGS = ("--kv-load-failure-policy", "fail", "--fallback", "fail")


def assert_transfers(ring: ProcessRing, oracle: Oracle, seed: int) -> None:
    """Counted, so that a silent fallback shows."""
    before = ring.decode.counter("pdserve_prompt_tokens_computed_total")
    prompt = make_prompt(11, seed=seed)
    assert_right(ring.client.start(prompt, GREEDY)[1], oracle, prompt)
    assert ring.decode.counter("pdserve_prompt_tokens_computed_total") == before


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefill_node_that_dies_between_two_layers(tiny_llama: Path, oracle: Oracle, transport: str, policy: str):
    flags = ("--transport", transport, *(STRICT_FLAGS if policy == "fail" else ()))
    with process_ring(tiny_llama, *flags, prefill_failpoints="prefill.before_send.layer1=exit:9") as ring:
        running_prompt, prompt = make_prompt(3, seed=1), make_prompt(17, seed=2)
        _, answer = ring.client.start(prompt, GREEDY)
        if policy == "fail":
            assert answer.final.error_kind is ErrorKind.PEER_UNREACHABLE
        else:
            assert_right(answer, oracle, prompt)
        assert ring.prefill.ended() == 9
        if policy == "recompute":
            assert_right(ring.client.start(running_prompt, GREEDY)[1], oracle, running_prompt)
        ring.wait_until_at_rest(ring.decode)
        ring.prefill.restart()
        ring.wait_until_met()
        assert_transfers(ring, oracle, seed=3)
        ring.wait_until_at_rest()


def test_a_killed_prefill_node_disturbs_nobody_who_runs(tiny_llama: Path, oracle: Oracle, transport: str):
    with process_ring(tiny_llama, "--transport", transport) as ring:
        prompt = make_prompt(5, seed=4)
        _, running = ring.client.start(prompt, LONG)
        wait_until(lambda: len(running.token_ids) > 3, "it runs")
        ring.prefill.kill()
        assert_right(running, oracle, prompt, LONG.max_tokens)
        ring.wait_until_at_rest(ring.decode)
        assert ring.decode.is_ready(), "it serves alone"


def test_a_prefill_node_that_stands_still(tiny_llama: Path, oracle: Oracle, transport: str):
    """SIGSTOP in the middle of a transfer. Over shared memory its blocks stay out of use until it is heard again."""
    point = "prefill.before_send.layer1"
    with process_ring(
        tiny_llama, "--transport", transport, *IMPATIENT, prefill_failpoints=f"{point}=pause:30*1"
    ) as ring:
        prompt = make_prompt(17, seed=5)
        _, answer = ring.client.start(prompt, GREEDY)
        wait_until(lambda: ring.prefill.hits(point) > 0, "in the middle of a transfer")
        ring.prefill.kill(signal.SIGSTOP)
        assert_right(answer, oracle, prompt)
        assert ring.decode.counter("pdserve_kv_loads_recomputed_total") == 1
        assert (ring.decode.get("/debug/state")["blocks"]["pinned"] > 0) == (transport == "shm")
        other = make_prompt(13, seed=6)
        assert_right(ring.client.start(other, GREEDY)[1], oracle, other)
        ring.prefill.kill(signal.SIGCONT)
        ring.prefill.disarm(point)
        ring.wait_until_met()
        ring.wait_until_at_rest()
        assert_transfers(ring, oracle, seed=7)


def test_a_killed_decode_node_leaves_nothing_on_the_prefill_node(tiny_llama: Path, transport: str):
    point = "prefill.before_send.layer1"
    with process_ring(
        tiny_llama, "--transport", transport, *IMPATIENT, prefill_failpoints=f"{point}=pause:30*1"
    ) as ring:
        ring.client.start(make_prompt(17, seed=8), GREEDY)
        wait_until(lambda: ring.prefill.hits(point) > 0, "in the middle of a transfer")
        ring.decode.kill()
        ring.prefill.disarm(point)
        ring.wait_until_at_rest(ring.prefill)
        ring.client.answers.clear()


def test_sigterm_during_a_throttled_transfer(tiny_llama: Path, oracle: Oracle):
    """The transfer is completed, new requests are refused, and the exit status is 0."""
    with (
        running_relay(bytes_per_second=20e3) as relay,
        process_ring(tiny_llama, "--transport", "zmq", kv_address=relay.address, relay=relay) as ring,
        front_process(tiny_llama, "--node", ring.prefill.where["address"]) as front,
    ):
        prompt = make_prompt(30, seed=9)
        _, answer = ring.client.start(prompt, GREEDY)
        wait_until(lambda: ring.decode.counter("pdserve_kv_units_received_total") > 0, "under way")
        ring.prefill.kill(signal.SIGTERM)
        wait_until(lambda: front.status() == 503, "it says so")
        assert front.complete().status_code == 503
        refused = make_prompt(9, seed=10)
        _, other = ring.client.start(refused, GREEDY)
        assert_right(answer, oracle, prompt)
        assert_right(other, oracle, refused)
        assert ring.prefill.ended() == 0
        assert ring.decode.counter("pdserve_kv_transfers_received_total") == 1
        # Refused by the draining node, or by then known to be gone: computed here either way, and counted.
        counted = ("kv_loads_recomputed", "local_prefills_without_node")
        assert sum(ring.decode.counter(f"pdserve_{name}_total") for name in counted) == 1


def test_sigterm_on_a_decode_node_ends_streams_first(tiny_llama: Path, oracle: Oracle):
    with process_ring(tiny_llama) as ring:
        prompt = make_prompt(9, seed=11)
        _, answer = ring.client.start(prompt, LONG)
        wait_until(lambda: len(answer.token_ids) > 2, "it runs")
        ring.decode.kill(signal.SIGTERM)
        wait_until(lambda: not ring.decode.is_ready(), "not ready any more")
        _, refused = ring.client.start(prompt, GREEDY)
        assert refused.final.error_kind is ErrorKind.NO_NODE_READY
        assert_right(answer, oracle, prompt, LONG.max_tokens)
        assert ring.decode.ended() == 0
