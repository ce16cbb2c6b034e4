"""Logprobs over HTTP, through a ring, are transformers' to 1e-3: the first token's, which the prefill node computes,
later ones, the alternatives, and the prompt's, in every shape of the API."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.model_source import cached_builtin
from tests.oracle import Oracle
from tests.ring import Ring, running_ring
from tests.server_rig import RunningServer, events_of, running_server
from tests.tiny_models import save_tiny_model

NUM_TOKENS = 6
NUM_TOP = 5
TOLERANCE = 1e-3
MODELS = ["llama", "mistral-window", "qwen3-window-biases", "llama-tied in chunks"]
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@dataclass
class Rig:
    """A ring, a server in front of it, and the oracle."""

    ring: Ring
    server: RunningServer
    oracle: Oracle

    def prompt(self, length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(290), k=length)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        reply = self.server.client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def check_top(self, top: dict[str, float], row: Any, *tokens: str) -> None:
        """The likeliest tokens of a row, and `tokens`. Texts of ids that have no text of their own coincide."""
        values, ids = row.topk(NUM_TOP)
        expected = {self.text(i): value for i, value in zip(ids.tolist(), values.tolist(), strict=True)}
        assert set(top) == {*expected, *tokens}
        for text, value in expected.items():
            assert top[text] == pytest.approx(value, abs=TOLERANCE)

    def text(self, token_id: int) -> str:
        return self.server.assets.tokenizer.token_text(token_id)

    @property
    def prompt_tokens_computed(self) -> tuple[int, int]:
        """By the prefill and by the decode node."""
        nodes = (self.ring.prefill, self.ring.decode)
        prefill, decode = (node.engine.scheduler.counters.prompt_tokens_computed for node in nodes)
        return prefill, decode


def running_rig(directory: Path, **settings: Any) -> Iterator[Rig]:
    oracle = Oracle(directory)
    with running_ring(directory, **settings) as ring:
        decode, prefill = (node.node.where["address"] for node in (ring.decode, ring.prefill))
        with running_server(directory, [decode], [prefill]) as server:
            server.wait_ready()
            yield Rig(ring, server, oracle)


@pytest.fixture(scope="module", params=[*MODELS, pytest.param("demo", marks=pytest.mark.demo_model)])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if request.param == "demo":
        directory = cached_builtin("smollm2-135m")
        assert directory is not None, "run `make model` first"
        yield from running_rig(directory, block_size=16, num_blocks=128, transfer_timeout=120.0, peer_timeout=30.0)
        return
    variant, _, is_chunked = request.param.partition(" ")
    directory = save_tiny_model(tmp_path_factory.mktemp(variant), variant)
    yield from running_rig(directory, long_prefill_token_threshold=5 if is_chunked else 0, num_blocks=128)


def close_to(expected: Sequence[float]) -> Any:
    return pytest.approx(list(expected), abs=TOLERANCE)


def own_logprobs(oracle: Oracle, token_ids: Sequence[int], start: int) -> list[float]:
    """Of the tokens at positions from `start` on, given those before them."""
    rows = oracle.logprobs(token_ids)
    return [float(rows[i - 1, token_ids[i]]) for i in range(start, len(token_ids))]


def test_completions(rig: Rig):
    before = rig.prompt_tokens_computed
    prompt = rig.prompt(33, seed=1)
    (choice,) = rig.complete(prompt, logprobs=NUM_TOP, return_token_ids=True)["choices"]
    output = choice["token_ids"]
    assert output == rig.oracle.greedy(prompt, NUM_TOKENS)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == close_to(own_logprobs(rig.oracle, prompt + output, 33))
    rows = rig.oracle.logprobs(prompt + output)
    for position, top in enumerate(logprobs["top_logprobs"], start=32):
        rig.check_top(top, rows[position], rig.text((prompt + output)[position + 1]))
    prefill, decode = rig.prompt_tokens_computed
    assert (prefill - before[0], decode - before[1]) == (33, 0), "the first token was not the prefill node's"


def test_chat(rig: Rig):
    body = {"messages": [{"role": "user", "content": "Hello there"}], "logprobs": True, "top_logprobs": NUM_TOP}
    reply = rig.server.client.post(
        "/v1/chat/completions", json={**body, **GREEDY, "return_token_ids": True, "prompt_logprobs": 2}
    ).json()
    (choice,) = reply["choices"]
    prompt, output = reply["prompt_token_ids"], choice["token_ids"]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == close_to(own_logprobs(rig.oracle, prompt + output, len(prompt)))
    rows = rig.oracle.logprobs(prompt + output)[len(prompt) - 1 :]
    for entry, row in zip(entries, rows[:-1], strict=True):
        values, ids = row.topk(NUM_TOP)
        assert [top["logprob"] for top in entry["top_logprobs"]] == close_to(values.tolist())
        assert [top["token"] for top in entry["top_logprobs"]] == [rig.text(i) for i in ids.tolist()]
    check_prompt_logprobs(rig, reply["prompt_logprobs"], prompt, 2)


def check_prompt_logprobs(rig: Rig, shown: list[Any], prompt: Sequence[int], num_top: int) -> None:
    assert shown[0] is None
    assert len(shown) == len(prompt)
    rows = rig.oracle.logprobs(prompt)
    for entries, row, token_id in zip(shown[1:], rows[:-1], prompt[1:], strict=True):
        top_ids = row.topk(num_top).indices.tolist() if num_top else []
        assert [int(key) for key in entries] == list(dict.fromkeys([token_id, *top_ids]))
        for key, entry in entries.items():
            logprob = float(row[int(key)])
            assert entry["logprob"] == pytest.approx(logprob, abs=TOLERANCE)
            assert entry["decoded_token"] == rig.text(int(key))
            least, most = (int((row > logprob + slack).sum()) + 1 for slack in (TOLERANCE, -TOLERANCE))
            assert least <= entry["rank"] <= most
        ranks = [entry["rank"] for key, entry in entries.items() if int(key) in top_ids]
        assert sorted(ranks) == list(range(1, num_top + 1))


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_prompt_logprobs(rig: Rig, length: int):
    prompts = [rig.prompt(length, seed=2), rig.prompt(length + 1, seed=3)]
    for num_top in (0, 3):
        before = rig.prompt_tokens_computed
        choices = rig.complete(prompts, prompt_logprobs=num_top)["choices"]
        for choice, prompt in zip(choices, prompts, strict=True):
            check_prompt_logprobs(rig, choice["prompt_logprobs"], prompt, num_top)
            assert choice["logprobs"] is None
        prefill, decode = rig.prompt_tokens_computed
        # Also the second time: what is cached has no logits. A single token has no logprobs, and may be cached.
        least = sum(len(prompt) for prompt in prompts if len(prompt) > 1)
        assert prefill - before[0] >= least
        assert decode == before[1]


def test_blocks_computed_for_prompt_logprobs_are_found_by_others(rig: Rig):
    prompt = rig.prompt(40, seed=4)
    assert rig.complete(prompt, prompt_logprobs=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = rig.complete(prompt)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    again = rig.complete(prompt, prompt_logprobs=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["text"] == plain["choices"][0]["text"]


def merged_stream(reply: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events_of(reply):
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None, "token_ids": []})
            whole["text"] += part["text"]
            whole["token_ids"] += part.get("token_ids", [])
            if (logprobs := part["logprobs"]) is not None:
                known = whole["logprobs"] or {name: [] for name in logprobs}
                whole["logprobs"] = {name: known[name] + logprobs[name] for name in logprobs}
            if part["finish_reason"]:
                whole["finish_reason"] = part["finish_reason"]
    return choices


@pytest.mark.parametrize("max_tokens", [0, 1, NUM_TOKENS])
def test_echo_with_logprobs_as_evaluation_harnesses_send_it(rig: Rig, max_tokens: int):
    """The log-likelihood of a continuation is the sum over its tokens; `max_tokens` 0 or 1, both are in use."""
    prompts = [rig.prompt(21, seed=5), rig.prompt(3, seed=6), rig.prompt(1, seed=7)]
    fields = {"echo": True, "logprobs": NUM_TOP, "max_tokens": max_tokens, "return_token_ids": True, "n": 2}
    body = rig.complete(prompts, **fields)
    streamed = merged_stream(
        rig.server.client.post("/v1/completions", json={"prompt": prompts, **GREEDY, **fields, "stream": True})
    )
    assert body["usage"]["completion_tokens"] == 6 * max_tokens
    for index, choice in enumerate(body["choices"]):
        prompt, output, logprobs = prompts[index // 2], choice["token_ids"], choice["logprobs"]
        assert len(output) == max_tokens
        tokens = prompt + output
        assert logprobs["tokens"] == [rig.text(token_id) for token_id in tokens]
        assert logprobs["token_logprobs"] == [None, *close_to_each(own_logprobs(rig.oracle, tokens, 1))]
        rows = rig.oracle.logprobs(tokens)
        assert logprobs["top_logprobs"][0] is None
        for position, top in enumerate(logprobs["top_logprobs"][1:]):
            rig.check_top(top, rows[position], rig.text(tokens[position + 1]))
        check_offsets(rig, logprobs["text_offset"], tokens, choice["text"])
        for name in ("text", "token_ids", "finish_reason"):
            assert streamed[index][name] == choice[name], name
        for name in ("tokens", "text_offset"):
            assert streamed[index]["logprobs"][name] == logprobs[name], name
        # Batches differ, so their last bits may.
        assert streamed[index]["logprobs"]["token_logprobs"] == [None, *close_to_each(logprobs["token_logprobs"][1:])]
        for ours, theirs in zip(streamed[index]["logprobs"]["top_logprobs"], logprobs["top_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=TOLERANCE)


def close_to_each(values: Sequence[float]) -> list[Any]:
    return [pytest.approx(value, abs=TOLERANCE) for value in values]


def check_offsets(rig: Rig, offsets: Sequence[int], tokens: Sequence[int], text: str) -> None:
    """Each token stands where its offset says, up to the first that is no text by itself."""
    assert list(offsets) == sorted(offsets)
    for offset, token_id in zip(offsets, tokens, strict=True):
        piece = rig.text(token_id)
        if piece.startswith("bytes:") or token_id in rig.server.assets.tokenizer.special_ids:
            break
        assert text[offset : offset + len(piece)] == piece


def test_text_offsets_in_a_text_with_special_tokens_and_half_characters(rig: Rig):
    prompt = "<|im_start|>user\nüber 日本 <|im_end|> and on"
    (choice,) = rig.complete(prompt, echo=True, logprobs=0, max_tokens=2)["choices"]
    assert choice["text"].startswith(prompt)
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert len(offsets) == len(tokens)
    for offset, token in zip(offsets[:-2], tokens[:-2], strict=True):
        if not token.startswith("bytes:"):
            assert prompt[offset : offset + len(token)] == token
    assert offsets[-2] == len(prompt)


def test_the_oracle_would_see_a_wrong_position(rig: Rig):
    """Proves that the comparisons above can fail: neighbours differ by far more than the tolerance."""
    prompt = rig.prompt(33, seed=1)
    own = own_logprobs(rig.oracle, prompt, 1)
    assert sum(abs(a - b) > 100 * TOLERANCE for a, b in pairwise(own)) > 20
