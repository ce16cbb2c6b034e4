"""Structured output from clients to the real processes and back; documents are checked by another implementation."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.processes import UpRing, running_up
from tests.json_schemas import Schema, fifty_schemas

NUM_PER_SCHEMA, CONCURRENCY = 10, 48


@pytest.fixture(scope="module")
def ring(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRing]:
    flags = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--num-blocks", "2048", "--block-size", "8")
    with running_up(tmp_path_factory.mktemp("ring"), *flags) as ring:
        yield ring


def ways_to_ask(schema: Schema, number: int) -> tuple[str, dict[str, Any]]:
    """Path and body; the ways take turns."""
    rest = {"model": "tiny", "temperature": 1.0, "seed": number, "max_tokens": 900}
    messages = [{"role": "user", "content": f"Document {number}, please."}]
    response_format = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    match number % 4:
        case 0:
            return "/v1/chat/completions", {**rest, "messages": messages, "response_format": response_format}
        case 1:
            return "/v1/completions", {**rest, "prompt": f"Document {number}:", "response_format": response_format}
        case 2:
            return "/v1/chat/completions", {**rest, "messages": messages, "structured_outputs": {"json": schema}}
        case _:
            return "/v1/completions", {**rest, "prompt": f"Document {number}:", "guided_json": schema}


def test_five_hundred_documents_of_fifty_schemas_are_all_valid(ring: UpRing) -> None:
    """The weights are random: nothing but the masks makes these documents."""

    async def run() -> list[tuple[Schema, dict[str, Any]]]:
        limit = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=ring.url, timeout=120) as client:

            async def one(schema: Schema, number: int) -> tuple[Schema, dict[str, Any]]:
                path, body = ways_to_ask(schema, number)
                async with limit:
                    reply = await client.post(path, json=body)
                assert reply.status_code == 200, reply.text
                return schema, reply.json()["choices"][0]

            schemas = fifty_schemas() * NUM_PER_SCHEMA
            return await asyncio.gather(*(one(schema, number) for number, schema in enumerate(schemas)))

    texts = set()
    for schema, choice in asyncio.run(run()):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert choice["finish_reason"] == "stop", text
        Draft202012Validator(schema).validate(json.loads(text))
        texts.add(text)
    assert len(texts) > 300, "they differ: seeds and schemas do"
    ring.wait_until_quiescent()
    decode = ring.metrics("decode-0")
    assert decode["pdserve_prompt_tokens_loaded_total"] > 0, "first tokens came from the prefill node"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["rouge", "noir"]}, {"rouge", "noir"}),
        ({"structured_outputs": {"regex": "(ab){2}"}}, {"abab"}),
        ({"guided_grammar": 'root ::= "x" | "y"\n'}, {"x", "y"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}, "min_tokens": 5}, {"x", "y"}),
        ({"guided_choice": ["\N{GRINNING FACE}\n"], "ignore_eos": True}, {"\N{GRINNING FACE}\n"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_other_kinds(ring: UpRing, fields: dict[str, Any], expected: set[str], stream: bool) -> None:
    body = {"model": "tiny", "prompt": "Which?", "max_tokens": 40, "stream": stream, **fields}
    reply = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    else:
        choices = reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) in expected
    assert choices[-1]["finish_reason"] == "stop"


def test_a_document_cut_short_is_said_to_be(ring: UpRing) -> None:
    schema = {"type": "object", "properties": {"long": {"type": "string", "minLength": 50}}, "required": ["long"]}
    body = {"model": "tiny", "prompt": "Go:", "max_tokens": 3, "guided_json": schema}
    choice = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("{")


def test_a_bad_schema_is_refused_and_the_ring_goes_on(ring: UpRing) -> None:
    for schema, reason in (({"not": {}}, "not"), ({"type": "integer", "multipleOf": 999_983}, "longer than 2 s")):
        body = {"model": "tiny", "prompt": "Go:", "guided_json": schema}
        reply = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_json")
        assert reason in reply.json()["error"]["message"]
    body = {"model": "tiny", "prompt": "Go:", "guided_choice": ["on"]}
    assert httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == "on"
    ring.wait_until_quiescent()
