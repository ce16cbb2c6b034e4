"""Held KV: a first leg that keeps it, a second that pulls it, as routers written for vLLM's protocol drive them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from connector.codec import encode
from connector.held_params import to_pull
from connector.kv_transfer_params import KVTransferParams
from connector.server_messages import ReleaseKV
from engine.errors import ErrorKind
from engine.sampling_params import SamplingParams
from tests.integration.test_golden import GREEDY, make_prompt
from tests.oracle import Oracle
from tests.ring import Ring, node_config, running_client, running_node, running_ring, wait_until

HOLD = KVTransferParams(do_remote_decode=True, do_remote_prefill=False)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(params=["zmq", "shm"])
def ring(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Ring]:
    with running_ring(tiny_llama, transport=request.param, lease_seconds=5.0) as ring:
        yield ring


def first_leg(ring: Ring, prompt: list[int]) -> KVTransferParams:
    with running_client(ring.prefill) as client:
        final = client.generate(prompt, ONE_TOKEN, kv_transfer_params=HOLD).final
    assert final.kv_transfer_params is not None
    return final.kv_transfer_params


def changed(params: KVTransferParams, **fields: object) -> KVTransferParams:
    return KVTransferParams(**({name: getattr(params, name) for name in params.__struct_fields__} | fields))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 33])
def test_the_second_leg_continues_from_what_the_first_held(ring: Ring, oracle: Oracle, length: int):
    prompt = make_prompt(length, seed=50)
    params = first_leg(ring, prompt)
    assert params.remote_num_tokens == length
    assert ring.prefill.state()["blocks"]["pinned"] == -(-length // 4)
    computed_before = ring.prefill.engine.scheduler.counters.prompt_tokens_computed
    answer = ring.client.generate(prompt, GREEDY, kv_transfer_params=params)
    assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
    counters = ring.decode.engine.scheduler.counters
    assert (counters.prompt_tokens_loaded, counters.prompt_tokens_computed) == (length, 1)
    assert ring.prefill.engine.scheduler.counters.prompt_tokens_computed == computed_before, "nothing was granted"
    ring.wait_until_quiescent()


def test_a_second_leg_with_a_longer_prompt_computes_the_rest(ring: Ring, oracle: Oracle):
    prompt = make_prompt(30, seed=51)
    params = first_leg(ring, prompt[:20])
    answer = ring.client.generate(prompt, GREEDY, kv_transfer_params=params)
    assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
    assert ring.decode.engine.scheduler.counters.prompt_tokens_computed == 10


def test_the_second_leg_tells_what_the_holder_had_cached(ring: Ring):
    prompt = make_prompt(21, seed=58)
    with running_client(ring.prefill) as client:
        client.generate(prompt, ONE_TOKEN)
    params = first_leg(ring, prompt)
    assert params.remote_prefill_cached_tokens == 20
    final = ring.client.generate(prompt, GREEDY, kv_transfer_params=params).final
    assert (final.num_prompt_tokens, final.num_cached_tokens) == (21, 20)
    assert to_pull(changed(params, remote_prefill_cached_tokens=2**40)).num_cached_tokens == 21, "no more than it holds"


def test_a_second_leg_may_hold_what_it_made_for_a_third(tiny_llama: Path, oracle: Oracle):
    """Both flags: the decode node pulls, generates, and keeps the KV; another one goes on from there."""
    config = node_config(tiny_llama)
    anywhere = {"kv_listen": "tcp://127.0.0.1:0"}
    both = {"do_remote_prefill": True, "do_remote_decode": True}
    with ExitStack() as stack:
        prefill = stack.enter_context(running_node("prefill", config, **anywhere))
        first = stack.enter_context(
            running_node("decode", config, prefill=(prefill.node.where["kv_address"],), **anywhere)
        )
        second = stack.enter_context(running_node("decode", config, prefill=(first.node.where["kv_address"],)))
        for node in (first, second):
            wait_until(node.worker.receiver.ready_peers, "the handshake")
        clients = [stack.enter_context(running_client(node)) for node in (prefill, first, second)]
        prompt = make_prompt(21, seed=59)
        params = clients[0].generate(prompt, ONE_TOKEN, kv_transfer_params=HOLD).final.kv_transfer_params
        answer = clients[1].generate(prompt, GREEDY, kv_transfer_params=changed(params, **both))
        assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        params = answer.final.kv_transfer_params
        assert params is not None
        assert params.remote_num_tokens == 21 + GREEDY.max_tokens - 1, "all but the last token's"
        history = prompt + answer.token_ids + make_prompt(5, seed=60)
        answer = clients[2].generate(history, GREEDY, kv_transfer_params=params)
        assert answer.token_ids == oracle.greedy(history, GREEDY.max_tokens)
        assert second.engine.scheduler.counters.prompt_tokens_loaded == params.remote_num_tokens
        assert first.worker.leases.counters.num_read == 1
        for node in (prefill, first, second):
            wait_until(node.is_quiescent, f"at rest: {node.state()}")


def test_another_prompt_is_computed_here_and_right(ring: Ring, oracle: Oracle):
    params = first_leg(ring, make_prompt(20, seed=52))
    prompt = make_prompt(20, seed=53)
    answer = ring.client.generate(prompt, GREEDY, kv_transfer_params=params)
    assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
    assert ring.decode.engine.scheduler.counters.num_loads_recomputed == 1
    assert ring.prefill.worker.leases.counters.num_refused_reads == 1


@pytest.mark.parametrize(
    "change",
    [
        {"remote_request_id": "forged"},
        {"remote_engine_id": "nobody@epoch"},
        {"remote_host": "192.0.2.1", "remote_port": 9, "remote_engine_id": "192.0.2.1@x"},
    ],
)
def test_forged_params_lead_nowhere(ring: Ring, oracle: Oracle, change: dict[str, object]):
    prompt = make_prompt(20, seed=54)
    params = changed(first_leg(ring, prompt), **change)
    addresses = [peer.address for peer in ring.decode.worker.receiver.peers]
    answer = ring.client.generate(prompt, GREEDY, kv_transfer_params=params)
    assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
    assert [peer.address for peer in ring.decode.worker.receiver.peers] == addresses, "a client's address was dialled"
    assert ring.decode.engine.scheduler.counters.prompt_tokens_loaded == 0


def test_params_that_are_not_ours_are_refused_by_name(ring: Ring):
    _, answer = ring.client.start([1, 2], GREEDY, kv_transfer_params=KVTransferParams(do_remote_prefill=True))
    assert answer.final.error_kind is ErrorKind.INVALID_REQUEST
    assert answer.final.error_param == "kv_transfer_params.remote_engine_id"


def test_a_decode_node_that_cannot_hold_says_so(ring: Ring):
    _, answer = ring.client.start([1, 2], ONE_TOKEN, kv_transfer_params=HOLD)
    assert answer.final.error_kind is ErrorKind.INVALID_REQUEST
    assert "holds no KV" in answer.final.error
    assert answer.final.error_param == "kv_transfer_params.do_remote_decode"


def test_without_a_second_leg_the_lease_expires_and_a_late_one_recomputes(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(20, seed=55)
    with running_ring(tiny_llama, lease_seconds=0.2) as ring:
        params = first_leg(ring, prompt)
        wait_until(ring.prefill.is_quiescent, "the lease expired")
        assert ring.prefill.worker.leases.counters.num_expired == 1
        answer = ring.client.generate(prompt, GREEDY, kv_transfer_params=params)
        assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        assert ring.decode.engine.scheduler.counters.num_loads_recomputed == 1


def test_a_router_that_gives_up_has_the_blocks_freed_by_either_node(ring: Ring):
    for through_decode in (False, True):
        params = first_leg(ring, make_prompt(20, seed=56))
        assert len(ring.prefill.worker.leases) == 1
        with running_client(ring.decode if through_decode else ring.prefill) as client:
            client._node.send([encode(ReleaseKV(kv_transfer_params=params))])
            wait_until(ring.prefill.is_quiescent, f"released: {ring.prefill.state()}")
    assert ring.prefill.worker.leases.counters.num_released == 2


def test_a_second_leg_that_is_cancelled_while_it_waits_frees_the_blocks(tiny_llama: Path):
    """The only seat is taken: the second leg waits, its heartbeats keep the lease, its end releases it."""
    settings = {"lease_seconds": 0.5, "heartbeat_interval": 0.05, "decode": {"max_num_seqs": 1, "num_blocks": 256}}
    with running_ring(tiny_llama, **settings) as ring:
        busy_id, _ = ring.client.start([1, 2], SamplingParams(max_tokens=900, ignore_eos=True))
        wait_until(lambda: ring.decode.engine.scheduler.num_running == 1, "the seat is taken")
        prompt = make_prompt(20, seed=57)
        params = first_leg(ring, prompt)
        request_id, answer = ring.client.start(prompt, GREEDY, kv_transfer_params=params)
        renewed = ring.prefill.worker.leases.counters
        wait_until(lambda: renewed.num_renewed > 15, "more heartbeats than the lease has time for")
        assert renewed.num_expired == 0
        ring.client.cancel(request_id)
        assert answer.final.finish_reason == "abort"
        wait_until(ring.prefill.is_quiescent, f"released: {ring.prefill.state()}")
        assert renewed.num_released == 1
        ring.client.cancel(busy_id)
