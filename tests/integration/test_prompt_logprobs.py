"""Prompt logprobs come once and right, whatever happens on their way."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest

from connector import failpoints
from engine.sampling_params import SamplingParams
from tests.integration.test_golden import WAYS, make_prompt
from tests.integration.test_held_kv import HOLD, first_leg
from tests.integration.test_ring import pausing_steps
from tests.oracle import Oracle
from tests.ring import Answer, node_config, running_client, running_node, running_ring, wait_until

NUM_TOP = 2
WANTED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=NUM_TOP)
SETTINGS = {"long_prefill_token_threshold": 8}


def assert_right(answer: Answer, prompt: Sequence[int], oracle: Oracle) -> None:
    assert answer.final.finish_reason == "length", answer.final.error
    assert answer.token_ids == oracle.greedy(prompt, 6)
    pieces = [output.prompt_logprobs for output in answer.outputs if output.prompt_logprobs is not None]
    assert [piece.start for piece in pieces] == [1, *(piece.end for piece in pieces)][: len(pieces)]
    first_token = next(i for i, output in enumerate(answer.outputs) if output.tokens)
    assert all(output.prompt_logprobs is None for output in answer.outputs[first_token:])
    entries = list(chain.from_iterable(pieces))
    rows = oracle.logprobs(prompt)[:-1]
    own = [float(row[token_id]) for row, token_id in zip(rows, prompt[1:], strict=True)]
    assert [entry.logprob for entry in entries] == pytest.approx(own, abs=1e-3)
    tops = [entry.top_logprobs for entry in entries]
    assert [[i for i, _ in top] for top in tops] == [row.topk(NUM_TOP).indices.tolist() for row in rows]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_every_way_of_kv(tiny_llama: Path, oracle: Oracle, way: tuple[str, str]):
    prompts = [make_prompt(length, seed=70) for length in (1, 2, 3, 4, 5, 20, 33)]
    with running_ring(tiny_llama, transport=way[0], load_mode=way[1], **SETTINGS) as ring:
        for _ in range(2):
            answers = [ring.client.start(prompt, WANTED)[1] for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_right(answer, prompt, oracle)
        computed = ring.decode.engine.scheduler.counters.prompt_tokens_computed
        assert (computed > 0) == (way[1] == "sync"), "a sync load leaves the last position to the decode node: all are"


def test_alone_and_preempted(tiny_llama: Path, oracle: Oracle):
    prompts = [make_prompt(length, seed=71) for length in range(8, 20)]
    config = node_config(tiny_llama, num_blocks=16, watermark_blocks=0, long_prefill_token_threshold=5)
    with running_node("decode", config) as node, running_client(node) as client:
        answers = [client.start(prompt, WANTED)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_right(answer, prompt, oracle)
        assert node.engine.scheduler.counters.num_preemptions > 0, "the pool was not small enough to test this"


@pytest.mark.parametrize("is_first_lost", [True, False])
def test_a_lost_piece_is_computed_again(tiny_llama: Path, oracle: Oracle, is_first_lost: bool):
    prompt = make_prompt(33, seed=72)
    with running_ring(tiny_llama, **SETTINGS) as ring:
        failpoints.arm("prefill.before_prompt_piece=drop" + "*1" * is_first_lost)
        try:
            assert_right(ring.client.generate(prompt, WANTED), prompt, oracle)
        finally:
            failpoints.disarm_all()
        counters = ring.decode.engine.scheduler.counters
        assert (counters.num_loads_recomputed, counters.prompt_tokens_computed) == (1, 33)


def test_without_the_first_token_they_still_count(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(33, seed=73)
    with running_ring(tiny_llama, **SETTINGS) as ring:
        failpoints.arm("prefill.before_first_token=drop")
        try:
            assert_right(ring.client.generate(prompt, WANTED), prompt, oracle)
        finally:
            failpoints.disarm_all()
        counters = ring.decode.engine.scheduler.counters
        assert (counters.num_loads_recomputed, counters.prompt_tokens_computed) == (0, 1)


def test_a_prefill_node_that_dies_half_way(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(40, seed=74)
    with running_ring(tiny_llama, transport="zmq", **SETTINGS) as ring:
        sender = ring.prefill.worker.sender
        saved, num_saves = sender.save, []

        def save_then_die(request_id, layer, span, block_ids):
            saved(request_id, layer, span, block_ids)
            num_saves.append(layer)
            if len(num_saves) == 2 * 3:
                wait_until(lambda: ring.decode.worker.receiver.counters.num_units == 6, "they arrived")
                ring.prefill.node._kv_links.close()

        sender.save = save_then_die
        assert_right(ring.client.generate(prompt, WANTED), prompt, oracle)
        assert ring.decode.engine.scheduler.counters.prompt_tokens_computed == 40, "KV that arrived has no logits"


def test_the_next_prefill_node_computes_all_of_them(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(40, seed=75)
    with ExitStack() as stack:
        configs = [node_config(tiny_llama, name=name, transport="zmq", **SETTINGS) for name in ("p0", "p1")]
        nodes = [stack.enter_context(running_node("prefill", c, kv_listen="tcp://127.0.0.1:0")) for c in configs]
        addresses = tuple(node.node.where["kv_address"] for node in nodes)
        config = node_config(tiny_llama, transport="zmq", **SETTINGS)
        decode = stack.enter_context(running_node("decode", config, prefill=addresses))
        client = stack.enter_context(running_client(decode))
        wait_until(lambda: len(decode.worker.receiver.ready_peers()) == 2, "both handshakes")
        with pausing_steps(nodes[0]):
            _, answer = client.start(prompt, WANTED, prefill_nodes=["p0", "p1"])
            wait_until(lambda: nodes[0].worker.sender.open_transfer_ids(), "granted to the first")
            nodes[0].node._kv_links.close()
            assert_right(answer, prompt, oracle)
        assert decode.engine.scheduler.counters.prompt_tokens_computed == 0
        wait_until(decode.is_quiescent, f"at rest: {decode.state()}")


def test_legs_of_a_router(tiny_llama: Path, oracle: Oracle):
    """The first leg's node computes them itself. The second cannot read them out of held KV: it computes."""
    prompt = make_prompt(20, seed=76)
    with running_ring(tiny_llama) as ring:
        with running_client(ring.prefill) as client:
            answer = client.generate(prompt, WANTED, kv_transfer_params=HOLD)
        assert_right(answer, prompt, oracle)
        params = first_leg(ring, prompt)
        assert_right(ring.client.generate(prompt, WANTED, kv_transfer_params=params), prompt, oracle)
        counters = ring.decode.engine.scheduler.counters
        assert (counters.prompt_tokens_loaded, counters.prompt_tokens_computed) == (0, 20)
        ring.client.generate(prompt, WANTED, kv_transfer_params=answer.final.kv_transfer_params)
        wait_until(lambda: not ring.prefill.state()["transfers"]["leases"], "both leases were given back")
