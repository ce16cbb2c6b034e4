"""Structured output as the `openai` package asks for it."""

import json

import openai
import pytest

from tests.e2e.clients.conftest import MODEL
from tests.e2e.clients.schemas import Place

MESSAGES: list = [{"role": "user", "content": "Name a place."}]
ASK: dict = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200}
JSON_SCHEMA: dict = {
    "type": "json_schema",
    "json_schema": {"name": "place", "strict": True, "schema": Place.model_json_schema()},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parse_returns_the_pydantic_model(client: openai.OpenAI, temperature: float):
    reply = client.chat.completions.parse(**ASK, response_format=Place, temperature=temperature, seed=3)
    assert isinstance(reply.choices[0].message.parsed, Place)
    assert reply.choices[0].finish_reason == "stop"


def test_a_stream_parses_to_the_same_model(client: openai.OpenAI):
    whole = client.chat.completions.parse(**ASK, response_format=Place, temperature=0).choices[0].message.parsed
    with client.chat.completions.stream(**ASK, response_format=Place, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole == Place.model_validate_json("".join(deltas))
    assert len(deltas) > 3, "it came in one piece"


def test_json_schema_holds_for_every_choice(client: openai.OpenAI):
    reply = client.chat.completions.create(**ASK, response_format=JSON_SCHEMA, n=3, temperature=1, seed=1)
    places = [Place.model_validate_json(choice.message.content or "") for choice in reply.choices]
    assert len({place.model_dump_json() for place in places}) > 1


def test_a_completion_takes_a_schema_too(client: openai.OpenAI):
    extra = {"response_format": JSON_SCHEMA}
    reply = client.completions.create(model=MODEL, prompt="a place:", max_tokens=200, temperature=0, extra_body=extra)
    Place.model_validate_json(reply.choices[0].text)


def test_json_object_is_json(client: openai.OpenAI):
    """Random weights may go on for ever: what came until the limit is the beginning of an object."""
    reply = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, temperature=0).choices[0]
    text = reply.message.content or ""
    assert text.lstrip().startswith("{")
    if reply.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_cut_off_by_length_is_the_sdk_s_own_error(client: openai.OpenAI):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ASK, "max_tokens": 3}, response_format=Place)


@pytest.mark.parametrize(
    "schema", [{"type": "no such type"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_none_is_a_bad_request(client: openai.OpenAI, schema: dict, stream: bool):
    response_format: dict = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, response_format=response_format, stream=stream)  # type: ignore[call-overload]
    assert (caught.value.param or "").startswith("response_format")
