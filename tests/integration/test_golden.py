"""The golden test: transformers, one engine alone, and the ring give the same tokens, whatever the way KV takes."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.oracle import Oracle
from tests.ring import Client, Ring, node_config, running_client, running_node, running_ring

BLOCK_SIZE = 4
NUM_TOKENS = 10
LENGTHS = range(1, 3 * BLOCK_SIZE + 2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = [(transport, load_mode) for transport in ("zmq", "shm") for load_mode in ("async", "sync")]
CHUNKS = {"unchunked": 0, "chunks of 3": 3}


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(290), k=length)


def assert_all_golden(client: Client, oracle: Oracle, prompts: Sequence[Sequence[int]]) -> None:
    """All at once: mixed batches of prefill chunks and decodes."""
    answers = [client.start(prompt, GREEDY)[1] for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.final.finish_reason == "length", answer.final.error
        assert answer.token_ids == oracle.greedy(prompt, NUM_TOKENS), f"prompt of {len(prompt)} tokens"


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module", params=CHUNKS.values(), ids=CHUNKS)
def ring(request: pytest.FixtureRequest, way: tuple[str, str], tiny_llama: Path) -> Iterator[Ring]:
    settings = {"transport": way[0], "load_mode": way[1], "long_prefill_token_threshold": request.param}
    with running_ring(tiny_llama, **settings) as ring:
        yield ring


def test_each_length_alone(ring: Ring, oracle: Oracle):
    for length in LENGTHS:
        prompt = make_prompt(length, seed=1)
        assert ring.client.generate(prompt, GREEDY).token_ids == oracle.greedy(prompt, NUM_TOKENS)


def test_all_lengths_in_mixed_batches(ring: Ring, oracle: Oracle):
    assert_all_golden(ring.client, oracle, [make_prompt(length, seed=2) for length in LENGTHS])


def test_prefix_hits_on_both_nodes(ring: Ring, oracle: Oracle):
    whole = make_prompt(4 * BLOCK_SIZE + 1, seed=3)
    assert_all_golden(ring.client, oracle, [whole])
    hits_before = ring.decode.engine.scheduler.counters.prefix_hits
    # Each local hit length crossed with each remainder of the block.
    prompts = [
        [*whole[:common], *make_prompt(rest, seed=4 + common)]
        for common in range(0, len(whole) + 1, 2)
        for rest in range(1, BLOCK_SIZE + 1)
    ]
    assert_all_golden(ring.client, oracle, prompts)
    assert ring.decode.engine.scheduler.counters.prefix_hits > hits_before
    assert ring.prefill.engine.scheduler.counters.prefix_hits > 0


def test_one_engine_alone(tiny_llama: Path, oracle: Oracle):
    for threshold in CHUNKS.values():
        for caching in (True, False):
            config = node_config(
                tiny_llama, long_prefill_token_threshold=threshold, enable_prefix_caching=caching, num_blocks=128
            )
            with running_node("decode", config) as node, running_client(node) as client:
                assert_all_golden(client, oracle, [make_prompt(length, seed=2) for length in LENGTHS])
                assert_all_golden(client, oracle, [make_prompt(length, seed=2) for length in LENGTHS])


def test_preemption_changes_nothing(tiny_llama: Path, oracle: Oracle):
    settings = {"decode": {"num_blocks": 14, "watermark_blocks": 0}}
    with running_ring(tiny_llama, **settings) as ring:
        assert_all_golden(ring.client, oracle, [make_prompt(length, seed=6) for length in LENGTHS])
        assert ring.decode.engine.scheduler.counters.num_preemptions > 0, "the pool was not small enough to test this"


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_one_wrong_block_changes_the_output(tiny_llama: Path, oracle: Oracle, transport: str):
    """Proves that the tests above would see it: the prefill node ships one block with its bytes flipped."""
    prompt = make_prompt(3 * BLOCK_SIZE + 1, seed=7)
    with running_ring(tiny_llama, transport=transport) as ring:
        sender = ring.prefill.worker.sender
        saved = sender.save

        def flip_then_save(request_id: str, layer: int, span: range, block_ids: Sequence[int]) -> None:
            if layer == 1:
                block = sender._kv_caches[layer][block_ids[1]].view(torch.uint8)
                block.bitwise_not_()
            saved(request_id, layer, span, block_ids)

        sender.save = flip_then_save
        assert ring.client.generate(prompt, GREEDY).token_ids != oracle.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("way", WAYS, ids="-".join, indirect=True)
def test_seeded_sampling_is_the_same_alone_and_in_the_ring(way: tuple[str, str], tiny_llama: Path):
    prompts = [make_prompt(length, seed=8) for length in LENGTHS]
    settings = [
        SamplingParams(seed=seed, temperature=1.3, top_k=40, top_p=0.95, max_tokens=NUM_TOKENS, logprobs=3)
        for seed in range(len(prompts) - 2)
    ]
    settings.append(SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=8, logprobs=0))
    settings.append(SamplingParams(seed=6, min_p=0.02, min_tokens=8, max_tokens=8, logit_bias={7: 5.0}, logprobs=0))

    def outputs(client: Client) -> list[list[object]]:
        started = [client.start(*pair)[1] for pair in zip(prompts, settings, strict=True)]
        return [[output.tokens for output in answer.outputs if output.tokens] for answer in started if answer.final]

    config = node_config(tiny_llama)
    with running_node("decode", config) as node, running_client(node) as client:
        alone = outputs(client)
    with running_ring(tiny_llama, transport=way[0], load_mode=way[1]) as ring:
        together = outputs(ring.client)
    assert [[t.token_id for ts in tokens for t in ts] for tokens in together] == [
        [t.token_id for ts in tokens for t in ts] for tokens in alone
    ]
    for ours, theirs in zip(together, alone, strict=True):
        for (token,), (expected,) in zip(ours, theirs, strict=True):
            assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [i for i, _ in token.top_logprobs] == [i for i, _ in expected.top_logprobs]
