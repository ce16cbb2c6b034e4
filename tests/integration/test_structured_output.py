"""Grammars through the ring: the prefill node's first token, the rest on the decode node, and what comes between."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.errors import ErrorKind
from engine.grammar import Grammar
from engine.sampling_params import SamplingParams
from tests.integration.test_golden import make_prompt
from tests.ring import Answer, node_config, running_client, running_node, running_ring

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-z]{3,8}-[0-9]{2}"),
    Grammar("choice", '["the first of them", "the second of them", "another"]'),
    Grammar("lark", 'start: "(" start ")" | "x"'),
]
REQUESTS = [
    (make_prompt(length, seed=length), SamplingParams(max_tokens=80, seed=length, grammar=grammar, **settings))
    for grammar in GRAMMARS
    for length, settings in (
        (5, {"temperature": 0.0}),
        (33, {"temperature": 1.0}),
        (18, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
        (9, {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 40}),
    )
]


@pytest.fixture(scope="module")
def single_node(tiny_llama: Path) -> list[Answer]:
    """What one node makes of `REQUESTS`, one after the other."""
    with running_node("decode", node_config(tiny_llama)) as node, running_client(node) as client:
        return [client.generate(prompt, sampling) for prompt, sampling in REQUESTS]


def text_of(model: Path, answer: Answer) -> str:
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(answer.token_ids))


def test_one_node_follows_the_grammars(tiny_llama: Path, single_node: list[Answer]) -> None:
    texts = [text_of(tiny_llama, answer) for answer in single_node]
    for text, answer in zip(texts[:4], single_node[:4], strict=True):
        assert answer.final.finish_reason == "stop"
        assert json.loads(text).keys() == SCHEMA["properties"].keys()
    assert all(len(text.partition("-")[2]) == 2 for text in texts[4:8]), texts
    assert set(texts[8:12]) <= set(json.loads(GRAMMARS[2].text))
    assert all(text.strip("()") == "x" for text in texts[12:] if text[-1] in "x)"), texts


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_the_ring_makes_the_same_tokens(
    tiny_llama: Path, single_node: list[Answer], transport: str, load_mode: str
) -> None:
    """All at once, and the prefill node samples each first token where the load is asynchronous."""
    with running_ring(tiny_llama, transport=transport, load_mode=load_mode, num_blocks=400) as ring:
        started = [ring.client.start(prompt, sampling)[1] for prompt, sampling in REQUESTS]
        for answer, alone in zip(started, single_node, strict=True):
            assert answer.final.finish_reason == alone.final.finish_reason, answer.final.error
            assert answer.token_ids == alone.token_ids
        if load_mode == "async":
            assert ring.prefill.engine.scheduler.counters.generated_tokens == len(REQUESTS)
        assert ring.decode.engine.scheduler.counters.prompt_tokens_loaded > 0


def test_preempted_requests_go_on_where_they_were(tiny_llama: Path) -> None:
    grammar = Grammar("regex", "(abc|de){20}")
    rng = random.Random(5)
    requests = [
        (rng.choices(range(256), k=12), SamplingParams(max_tokens=70, seed=seed, grammar=grammar)) for seed in range(6)
    ]
    with running_node("decode", node_config(tiny_llama)) as node, running_client(node) as client:
        alone = [client.generate(prompt, sampling) for prompt, sampling in requests]
    with running_ring(tiny_llama, decode={"num_blocks": 40}) as ring:
        started = [ring.client.start(prompt, sampling)[1] for prompt, sampling in requests]
        assert [answer.final.finish_reason for answer in started] == ["stop"] * 6
        assert [answer.token_ids for answer in started] == [answer.token_ids for answer in alone]
        assert ring.decode.engine.scheduler.counters.num_preemptions > 0


def test_a_grammar_that_does_not_compile_ends_its_request_alone(tiny_llama: Path) -> None:
    """The server would not have sent it. Both nodes live on."""
    prompt, good = REQUESTS[0]
    with running_ring(tiny_llama) as ring:
        _, other = ring.client.start(prompt, good)
        _, bad = ring.client.start(prompt, replace(good, grammar=Grammar("regex", "a(")))
        assert (bad.final.finish_reason, bad.final.error_kind) == ("error", ErrorKind.INVALID_REQUEST)
        assert "unclosed group" in bad.final.error
        assert other.final.finish_reason == "stop"
        # Where only the prefill node cannot, the decode node does without it.
        ring.prefill.engine.scheduler._grammar_room = None
        _, alone = ring.client.start([*prompt, 7], good)
        assert alone.final.finish_reason == "stop", alone.final.error


def test_cancelled_while_the_grammar_is_compiled(tiny_llama: Path) -> None:
    names = ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(1500))
    slow = Grammar("json_schema", f'{{"type":"object","properties":{{{names}}}}}')
    with running_ring(tiny_llama) as ring:
        request_id, answer = ring.client.start(REQUESTS[0][0], SamplingParams(grammar=slow))
        ring.client.cancel(request_id)
        assert answer.final.finish_reason == "abort"
