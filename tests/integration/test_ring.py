"""What the ring does besides giving the right tokens: who computes, what travels when, how requests end."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ErrorKind
from engine.sampling_params import SamplingParams
from tests.integration.test_golden import GREEDY, make_prompt
from tests.oracle import Oracle
from tests.relay import running_relay
from tests.ring import node_config, running_client, running_node, running_ring, wait_until
from tests.tiny_models import save_tiny_model

STRICT = {"kv_load_failure_policy": "fail", "fallback": "fail"}
"""Failures end requests, so that a test sees them."""
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def test_kv_really_travels_and_the_decode_node_computes_no_prompt(tiny_llama: Path, transport: str):
    # An early request may be over before the end of its transfer was reported, and is then counted as cancelled.
    with running_ring(tiny_llama, transport=transport, early_admission=False) as ring:
        for length in (5, 16, 33):
            ring.client.generate(make_prompt(length, seed=20), GREEDY)
        decode, prefill = ring.decode.engine.scheduler.counters, ring.prefill.engine.scheduler.counters
        received, sent = ring.decode.worker.receiver.counters, ring.prefill.worker.sender.counters
        assert decode.prompt_tokens_computed == 0
        assert decode.prompt_tokens_loaded == prefill.prompt_tokens_computed == 5 + 16 + 33
        layout = ring.decode.node._plan.layout
        assert received.num_bytes == sent.num_bytes == 54 * layout.block_bytes // layout.block_size * layout.num_layers
        assert received.num_units == sent.num_units == 3 * layout.num_layers
        assert received.num_transfers_received == sent.num_transfers_sent == 3


def test_only_what_the_decode_node_lacks_travels(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(33, seed=21)
    with running_ring(tiny_llama, early_admission=False) as ring:
        ring.client.generate(prompt, GREEDY)
        before = ring.decode.worker.receiver.counters.num_bytes
        assert ring.client.generate(prompt, GREEDY).token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        layout = ring.decode.node._plan.layout
        one_token = layout.block_bytes // layout.block_size * layout.num_layers
        assert ring.decode.worker.receiver.counters.num_bytes - before == one_token, "32 of 33 tokens were hits"


def test_layer_zero_arrives_while_the_last_layer_is_still_to_be_computed(tmp_path: Path):
    """On a throttled link; one long chunk, so that layers, not chunks, overlap with the transfer."""
    model = save_tiny_model(
        tmp_path, num_hidden_layers=8, hidden_size=256, intermediate_size=1024, max_position_embeddings=2048
    )
    settings = {"transport": "zmq", "num_blocks": 600, "long_prefill_token_threshold": 0, "early_admission": False}
    with running_relay(bytes_per_second=20e6) as relay, running_ring(model, relay=relay, **settings) as ring:
        ring.client.generate(make_prompt(1500, seed=22), SamplingParams(temperature=0.0, max_tokens=2))
        (transfer,) = ring.decode.state()["transfers"]["recent"]
        assert transfer["num_units"] == 8, "one unit for each layer"
        first_units = transfer["layer_first_unit_at"]
        assert first_units[0] < transfer["computed_at"], "layer 0 waited for the last layer"
        assert first_units == sorted(first_units)
        assert relay.num_bytes_back >= transfer["num_bytes"]


@pytest.mark.parametrize("first_token_ends_it", ["eos", "stop", "length"])
def test_the_first_token_may_be_the_last(tiny_llama: Path, oracle: Oracle, first_token_ends_it: str, transport: str):
    prompt = make_prompt(9, seed=23)
    first = oracle.greedy(prompt, 1)[0]
    sampling = {
        "eos": SamplingParams(temperature=0.0, max_tokens=5),
        "stop": SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=(first,)),
        "length": SamplingParams(temperature=0.0, max_tokens=1),
    }[first_token_ends_it]
    with running_ring(tiny_llama, transport=transport) as ring:
        if first_token_ends_it == "eos":
            link = ring.decode.node._server_link
            make = link._door.make_request

            def with_eos(message, request_id):
                request = make(message, request_id)
                request.eos_token_ids = frozenset({first})
                return request

            link._door = replace(link._door, make_request=with_eos)
        answer = ring.client.generate(prompt, sampling)
        assert answer.token_ids == [first]
        assert answer.final.finish_reason == ("length" if first_token_ends_it == "length" else "stop")
        assert answer.final.stop_reason == (first if first_token_ends_it == "stop" else None)
        assert ring.decode.engine.scheduler.counters.prompt_tokens_computed == 0


def test_min_tokens_holds_back_the_end_on_both_nodes(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(9, seed=24)
    banned = tuple(oracle.greedy(prompt, 3))
    with running_ring(tiny_llama) as ring:
        sampling = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=4, stop_token_ids=banned)
        answer = ring.client.generate(prompt, sampling)
        assert not set(answer.token_ids[:4]) & set(banned)
        assert len(answer.token_ids) >= 5


def test_usage_counts_what_was_cached_on_the_prefill_node(tiny_llama: Path):
    prompt = make_prompt(14, seed=25)
    with running_ring(tiny_llama, decode={"enable_prefix_caching": False}) as ring:
        assert ring.client.generate(prompt, GREEDY).final.num_cached_tokens == 0
        again = ring.client.generate(prompt, GREEDY).final
        assert (again.num_prompt_tokens, again.num_cached_tokens) == (14, 12)


def test_salted_prompts_share_nothing(tiny_llama: Path):
    prompt = make_prompt(14, seed=26)
    with running_ring(tiny_llama) as ring:
        for salt in ("a", "b"):
            assert ring.client.generate(prompt, GREEDY, cache_salt=salt).final.num_cached_tokens == 0
        assert ring.client.generate(prompt, GREEDY, cache_salt="a").final.num_cached_tokens == 12


def test_cancel_at_any_moment_frees_both_nodes(tiny_llama: Path, transport: str):
    rng = random.Random(7)
    with running_ring(tiny_llama, transport=transport, long_prefill_token_threshold=8, num_blocks=512) as ring:
        for round_number in range(40):
            request_id, answer = ring.client.start(make_prompt(60, seed=100 + round_number), LONG)
            wanted = rng.choice([0, 0, 1, 3])
            if wanted:
                wait_until(lambda answer=answer, wanted=wanted: len(answer.token_ids) >= wanted, "some tokens")
            elif rng.random() < 0.5:
                wait_until(lambda: ring.decode.engine.scheduler.num_loading, "loading", timeout=5)
            ring.client.cancel(request_id)
            assert answer.final.finish_reason == "abort"
        ring.wait_until_quiescent()


def test_a_prompt_that_the_prefill_node_cannot_hold_is_an_error_and_not_a_hang(tiny_llama: Path):
    with running_ring(tiny_llama, prefill={"num_blocks": 4}, **STRICT) as ring:
        _, answer = ring.client.start(make_prompt(30, seed=27), GREEDY)
        assert answer.final.finish_reason == "error"
        assert answer.final.error_kind is ErrorKind.INVALID_REQUEST
        assert "30 tokens" in answer.final.error
        assert ring.client.generate(make_prompt(8, seed=27), GREEDY).final.finish_reason == "length"


@pytest.mark.parametrize(("length", "param"), [(256, "tokens; at most")])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(tiny_llama: Path, length: int, param: str):
    with running_ring(tiny_llama) as ring:
        _, answer = ring.client.start(make_prompt(length, seed=28), GREEDY)
        assert (answer.final.finish_reason, answer.final.error_kind) == ("error", ErrorKind.INVALID_REQUEST)
        assert param in answer.final.error


def test_a_lost_prefill_node_ends_its_requests_and_its_return_is_used(tiny_llama: Path, oracle: Oracle):
    """Over messages: shared memory stays pinned while the writer's process lives, and here that is this process."""
    prompt = make_prompt(40, seed=29)
    config = node_config(tiny_llama, transport="zmq", long_prefill_token_threshold=1, **STRICT)
    with running_node("prefill", config, kv_listen="tcp://127.0.0.1:0") as first:
        kv_address = first.node.where["kv_address"]
        with running_node("decode", config, prefill=(kv_address,)) as decode, running_client(decode) as client:
            wait_until(decode.worker.receiver.ready_peers, "the handshake")
            with pausing_steps(first):
                _, answer = client.start(prompt, GREEDY)
                wait_until(lambda: decode.engine.scheduler.num_loading == 1, "the load")
                first.node._kv_links.close()
                assert answer.final.error_kind is ErrorKind.PEER_UNREACHABLE
            first.close()
            wait_until(decode.is_quiescent, f"at rest: {decode.state()}")
            _, answer = client.start(prompt, GREEDY)
            assert answer.final.error_kind is ErrorKind.NO_NODE_READY
            with running_node("prefill", config, kv_listen=kv_address) as second:
                wait_until(decode.worker.receiver.ready_peers, "the second handshake")
                computed = decode.engine.scheduler.counters.prompt_tokens_computed
                assert client.generate(prompt, GREEDY).token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
                assert decode.engine.scheduler.counters.prompt_tokens_computed == computed, "a silent fallback"
                wait_until(second.is_quiescent, f"at rest: {second.state()}")
                wait_until(decode.is_quiescent, f"at rest: {decode.state()}")


def test_a_silent_prefill_node_ends_its_requests_within_the_deadline(tiny_llama: Path, transport: str):
    settings = {
        "transport": transport,
        "peer_timeout": 0.5,
        "heartbeat_interval": 0.05,
        "transfer_timeout": 5.0,
        **STRICT,
    }
    with running_relay() as relay, running_ring(tiny_llama, relay=relay, **settings) as ring:
        with pausing_steps(ring.prefill):
            _, answer = ring.client.start(make_prompt(20, seed=30), GREEDY)
            wait_until(lambda: ring.decode.engine.scheduler.num_loading == 1, "the load")
            relay.swallow = True
            assert answer.final.error_kind is ErrorKind.PEER_UNREACHABLE
            assert "silent" in answer.final.error
        relay.swallow = False
        relay.cut()
        wait_until(ring.decode.worker.receiver.ready_peers, "the handshake again")
        assert ring.client.generate(make_prompt(20, seed=31), GREEDY).final.finish_reason == "length"


def test_a_prefill_node_that_lives_but_does_not_step_is_a_deadline(tiny_llama: Path):
    settings = {"transfer_timeout": 0.4, "heartbeat_interval": 0.05, "peer_timeout": 30.0, "transport": "zmq", **STRICT}
    with running_ring(tiny_llama, **settings) as ring:
        with pausing_steps(ring.prefill):
            _, answer = ring.client.start(make_prompt(20, seed=32), GREEDY)
            assert answer.final.error_kind is ErrorKind.DEADLINE_EXCEEDED
        ring.wait_until_quiescent()


def test_a_lost_server_ends_its_requests_on_both_nodes(tiny_llama: Path):
    with running_ring(tiny_llama, num_blocks=64, server_timeout=0.3) as ring:
        with running_client(ring.decode) as client:
            client.start(make_prompt(20, seed=33), SamplingParams(max_tokens=200, ignore_eos=True))
            wait_until(lambda: ring.decode.engine.scheduler.num_running == 1, "running")
        ring.wait_until_quiescent()


def test_another_block_size_is_refused_at_readiness_with_the_reason(tiny_llama: Path):
    config = node_config(tiny_llama)
    other = node_config(tiny_llama, block_size=8)
    with (
        running_node("prefill", config, kv_listen="tcp://127.0.0.1:0") as prefill,
        running_node("decode", other, prefill=(prefill.node.where["kv_address"],)) as decode,
    ):
        peer = decode.worker.receiver.peers[0]
        wait_until(lambda: peer.state.value == "refused", "refused")
        assert "block_size is 4 here and 8 there" in decode.node._not_ready_reason()


def test_stopping_a_node_gives_every_request_its_final_message(tiny_llama: Path):
    config = node_config(tiny_llama)
    with running_node("decode", config) as node, running_client(node) as client:
        answers = [client.start(make_prompt(20, seed=34 + i), LONG)[1] for i in range(3)]
        wait_until(lambda: node.engine.scheduler.num_running == 3, "running")
        node.node.stop()
        assert [answer.final.finish_reason for answer in answers] == ["abort"] * 3


class _Pause:
    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()


class pausing_steps:
    """The node's engine stands still, its link threads do not."""

    def __init__(self, node) -> None:
        self._node = node
        self._pause = _Pause()

    def __enter__(self) -> None:
        self._step: Callable = self._node.engine.step

        def wait_then_step():
            self._pause.entered.set()
            assert self._pause.go_on.wait(30)
            return self._step()

        self._node.engine.step = wait_then_step

    def __exit__(self, *exc_info: object) -> None:
        self._node.engine.step = self._step
        self._pause.go_on.set()
