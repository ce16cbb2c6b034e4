"""The less common request fields, through real processes: the first token is the prefill node's, the rest the decode
node's, and neither may know less of a request than the other."""

from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.processes import UpRing
from tests.oracle import Oracle

PROMPT = list(range(40, 73))
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(tiny_llama) -> Oracle:
    return Oracle(tiny_llama)


@pytest.fixture
def ring(tiny_ring: UpRing):
    yield tiny_ring
    tiny_ring.wait_until_quiescent()


def complete(ring: UpRing, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{ring.url}/v1/completions", json={"prompt": PROMPT, **GREEDY, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(ring: UpRing, **fields: Any) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": PROMPT, **GREEDY, **fields, **options}
    lines = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60).text.split("\n\n")
    return [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]


def token_ids(ring: UpRing, **fields: Any) -> list[int]:
    return complete(ring, return_token_ids=True, **fields)["choices"][0]["token_ids"]


def test_echo_with_logprobs(ring: UpRing, oracle: Oracle):
    (choice,) = complete(ring, echo=True, logprobs=1, return_token_ids=True, prompt_logprobs=0)["choices"]
    tokens = PROMPT + choice["token_ids"]
    rows = oracle.logprobs(tokens)
    expected = [float(rows[i - 1, tokens[i]]) for i in range(1, len(tokens))]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    shown = [entry[str(i)]["logprob"] for entry, i in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)]
    assert shown == pytest.approx(expected[: len(shown)], abs=1e-3)


def test_allowed_tokens_and_bad_words_hold_for_the_first_token_too(ring: UpRing, oracle: Oracle):
    assert token_ids(ring) == oracle.greedy(PROMPT, 6)
    confined = token_ids(ring, allowed_token_ids=[70, 71, 72])
    assert set(confined) <= {70, 71, 72}
    assert confined[0] == max((70, 71, 72), key=lambda i: float(oracle.logprobs(PROMPT)[-1, i]))
    texts = (
        (length, complete(ring, prompt=PROMPT[:length], max_tokens=1)["choices"][0]["text"]) for length in range(4, 33)
    )
    length, letter = next((length, text) for length, text in texts if text.isascii() and text.isalpha())
    (first,) = oracle.greedy(PROMPT[:length], 1)
    without = token_ids(ring, prompt=PROMPT[:length], logit_bias={str(first): -100})
    assert first not in without
    assert token_ids(ring, prompt=PROMPT[:length], bad_words=[letter]) == without


def test_what_leaves_no_token_is_the_clients_fault(ring: UpRing):
    body = {"prompt": PROMPT, **GREEDY, "allowed_token_ids": [70], "stop_token_ids": [70], "min_tokens": 2}
    reply = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert "allowed_token_ids" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"prompt": [PROMPT, PROMPT[:9], [7]]},
        {"prompt": [PROMPT[:20], PROMPT[:20]], "n": 2, "temperature": 0.8, "seed": 6},
        {"echo": True},
        {"echo": True, "logprobs": 2, "prompt": [PROMPT[:5], PROMPT[:6]]},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"stop_token_ids": [70], "max_tokens": 20, "temperature": 1.0, "seed": 9},
        {"truncate_prompt_tokens": 7, "priority": -1, "request_id": "mine"},
    ],
    ids=str,
)
def test_a_stream_counts_and_says_what_one_piece_does(ring: UpRing, fields: dict[str, Any]):
    complete(ring, **fields)  # from here on all that can be cached is
    whole, events = complete(ring, **fields), stream(ring, **fields)
    assert events[-1]["usage"] == whole["usage"]
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert events[0]["id"] == events[-1]["id"]


def test_best_of_is_the_likeliest_of_the_same_seeds(ring: UpRing):
    fields = {"temperature": 1.0, "seed": 11, "logprobs": 0, "return_token_ids": True}
    every = complete(ring, n=5, **fields)
    best = complete(ring, n=2, best_of=5, **fields)

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = sorted(every["choices"], key=mean, reverse=True)[:2]
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in ranked]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 30
