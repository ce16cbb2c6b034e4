"""Failures that no client sees: the next prefill node, the decode node itself, and what did arrive is kept."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.integration.test_golden import GREEDY, make_prompt
from tests.integration.test_ring import pausing_steps
from tests.oracle import Oracle
from tests.relay import running_relay
from tests.ring import node_config, running_client, running_node, running_ring, wait_until
from tests.tiny_models import save_tiny_model


def test_the_next_prefill_node_takes_over(tiny_llama: Path, oracle: Oracle):
    settings = {"transport": "zmq", "long_prefill_token_threshold": 4}
    config = node_config(tiny_llama, **settings)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                running_node("prefill", node_config(tiny_llama, name=name, **settings), kv_listen="tcp://127.0.0.1:0")
            )
            for name in ("p0", "p1")
        ]
        addresses = tuple(node.node.where["kv_address"] for node in nodes)
        decode = stack.enter_context(running_node("decode", config, prefill=addresses))
        client = stack.enter_context(running_client(decode))
        receiver = decode.worker.receiver
        wait_until(lambda: len(receiver.ready_peers()) == 2, "both handshakes")
        prompt = make_prompt(40, seed=60)
        candidates = [node.node.where["name"] for node in nodes]
        with pausing_steps(nodes[0]):
            _, answer = client.start(prompt, GREEDY, prefill_nodes=candidates)
            wait_until(lambda: nodes[0].worker.sender.open_transfer_ids(), "granted to the first")
            nodes[0].node._kv_links.close()
            assert answer.final.finish_reason == "length", answer.final.error
        assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        assert receiver.counters.num_next_candidates == 1
        assert decode.engine.scheduler.counters.num_loads_recomputed == 0
        assert decode.engine.scheduler.counters.prompt_tokens_computed == 0
        wait_until(decode.is_quiescent, f"at rest: {decode.state()}")


def test_without_another_candidate_the_decode_node_computes_what_is_missing(tiny_llama: Path, oracle: Oracle):
    prompt = make_prompt(40, seed=61)
    with running_ring(tiny_llama, transport="zmq", long_prefill_token_threshold=8) as ring:
        sender = ring.prefill.worker.sender
        saved, num_saves = sender.save, []

        def save_then_die(request_id, layer, span, block_ids):
            saved(request_id, layer, span, block_ids)
            num_saves.append(layer)
            if len(num_saves) == 2 * 3:  # two chunks of 8 on all three layers
                wait_until(lambda: ring.decode.worker.receiver.counters.num_units == 6, "they arrived")
                ring.prefill.node._kv_links.close()

        sender.save = save_then_die
        answer = ring.client.generate(prompt, GREEDY)
        assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        counters = ring.decode.engine.scheduler.counters
        assert (counters.num_loads_recomputed, counters.recomputed_tokens) == (1, 24)
        assert counters.prompt_tokens_computed == 24, "the 16 that had arrived were kept"


def test_one_bad_unit_costs_its_request_some_tokens_and_others_nothing(tiny_llama: Path, oracle: Oracle):
    prompts = [make_prompt(33, seed=62 + i) for i in range(4)]
    with running_ring(tiny_llama, transport="zmq") as ring:
        receiver = ring.decode.worker.receiver
        check, spoilt = receiver._intake.check, []

        def spoil_one(transfer, unit, payload):
            if unit.layer == 2 and not spoilt:
                spoilt.append(transfer.request_id)
                torch.frombuffer(payload[0], dtype=torch.uint8)[7] ^= 1
            return check(transfer, unit, payload)

        receiver._intake.check = spoil_one
        answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.final.finish_reason == "length"
            assert answer.token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        assert receiver.counters.num_digest_mismatches == 1
        assert ring.decode.engine.scheduler.counters.num_loads_recomputed == 1


def test_without_any_prefill_node_the_decode_node_serves_alone(tiny_llama: Path, oracle: Oracle):
    config = node_config(tiny_llama)
    with (
        running_node("decode", config, prefill=("tcp://127.0.0.1:1",)) as decode,
        running_client(decode) as client,
    ):
        prompt = make_prompt(20, seed=66)
        assert client.generate(prompt, GREEDY).token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
        assert decode.node._connector.scheduler.local_prefills.num_without_node == 1


def test_little_is_computed_here(tiny_llama: Path, oracle: Oracle):
    with running_ring(tiny_llama, remote_prefill_threshold=8, early_admission=False) as ring:
        for length, loaded in ((7, 0), (8, 8), (9, 8 + 9)):
            prompt = make_prompt(length, seed=67)
            assert ring.client.generate(prompt, GREEDY).token_ids == oracle.greedy(prompt, GREEDY.max_tokens)
            assert ring.decode.engine.scheduler.counters.prompt_tokens_loaded == loaded


@pytest.mark.parametrize("seed", range(3))
def test_early_requests_make_the_same_tokens(tmp_path: Path, seed: int):
    """On a throttled link, where the last layers of the last chunk arrive while the first decode step runs."""
    model = save_tiny_model(tmp_path, num_hidden_layers=12, hidden_size=128, max_position_embeddings=2048)
    prompt = make_prompt(600, seed=70 + seed)
    settings = {"transport": "zmq", "num_blocks": 400, "credit_bytes": 1 << 18, "max_barrier_stall": 10.0}
    expected = Oracle(model).greedy(prompt, GREEDY.max_tokens)
    with running_relay(bytes_per_second=8e6) as relay, running_ring(model, relay=relay, **settings) as ring:
        assert ring.client.generate(prompt, GREEDY).token_ids == expected
        assert ring.decode.engine.scheduler.counters.num_early_admissions == 1
        assert ring.decode.worker.receiver.counters.num_barrier_waits > 0


def test_the_first_token_overtakes_kv_under_way(tmp_path: Path):
    """All of the KV fits the credit, so that most of it has left for the slow link when the token is sampled."""
    model = save_tiny_model(tmp_path, num_hidden_layers=12, hidden_size=128, max_position_embeddings=2048)
    settings = {"transport": "zmq", "num_blocks": 400, "early_admission": False}
    with running_relay(bytes_per_second=8e6) as relay, running_ring(model, relay=relay, **settings) as ring:
        wait_until(lambda: ring.prefill.worker.sender.num_express == 1, "the second connection")
        ring.client.generate(make_prompt(600, seed=77), GREEDY)
        (transfer,) = ring.decode.state()["transfers"]["recent"]
        assert transfer["first_token_at"] < transfer["layer_complete_at"][6]


def test_a_conversation_computes_only_what_is_new(tiny_llama: Path, oracle: Oracle):
    """Three turns: counted on both nodes, what is computed in turns two and three is new, within a block."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with running_ring(tiny_llama, num_blocks=200, early_admission=False) as ring:

        def computed() -> int:
            return sum(n.engine.scheduler.counters.prompt_tokens_computed for n in (ring.decode, ring.prefill))

        history = make_prompt(60, seed=80)
        for turn in range(3):
            before, moved = computed(), ring.decode.worker.receiver.counters.num_bytes
            answer = ring.client.generate(history, sampling)
            assert answer.token_ids == oracle.greedy(history, 16)
            if turn:
                # New for the decode node: what it has not seen. For the prefill node also what the other one generated.
                assert computed() - before <= 20 + 16 + 4
                layout = ring.decode.node._plan.layout
                one_token = layout.block_bytes // layout.block_size * layout.num_layers
                assert ring.decode.worker.receiver.counters.num_bytes - moved <= (20 + 1 + 4) * one_token
            history = history + answer.token_ids + make_prompt(20, seed=81 + turn)
