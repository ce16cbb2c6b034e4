"""/v1/responses as the `openai` package uses it: the text subset."""

import openai
import pytest

from tests.e2e.clients.conftest import MODEL
from tests.e2e.clients.schemas import GetWeather, Place

ASK: dict = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
TURNS: list = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("given", ["Hi", TURNS])
def test_a_response_says_what_the_chat_would(client: openai.OpenAI, given):
    response = client.responses.create(input=given, **ASK)
    messages: list = [{"role": "user", "content": given}] if isinstance(given, str) else given
    chat = client.chat.completions.create(messages=messages, model=MODEL, temperature=0, max_tokens=12)
    assert response.output_text == chat.choices[0].message.content
    assert response.object == "response"
    assert response.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_its_stream_agrees(client: openai.OpenAI):
    whole = client.responses.create(input=TURNS, **ASK)
    events = list(client.responses.create(input=TURNS, stream=True, **ASK))
    assert events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert text == done.text == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_instructions_come_first(client: openai.OpenAI):
    given = client.responses.create(input="Hi", instructions="Be brief.", **ASK)
    assert given.output_text == client.responses.create(input=TURNS, **ASK).output_text


def test_parse_returns_the_pydantic_model(client: openai.OpenAI):
    response = client.responses.parse(**{**ASK, "max_output_tokens": 200}, input="A place.", text_format=Place)
    assert isinstance(response.output_parsed, Place)
    assert response.status == "completed"


def test_a_tool_is_called(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    response = client.responses.create(
        **{**ASK, "max_output_tokens": 200},
        input="Weather in Rome?",
        tools=[{"type": "function", **tool}],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "get_weather"},
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather"
    GetWeather.model_validate_json(call.arguments)


@pytest.mark.parametrize(
    ("fields", "param"), [({"temperature": -1}, "temperature"), ({"max_output_tokens": 0}, "max_output_tokens")]
)
def test_a_bad_request_names_its_field(client: openai.OpenAI, fields: dict, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASK, "input": "Hi", **fields})
    assert caught.value.param == param


def test_what_is_stored_nowhere_cannot_be_continued(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="Hi", previous_response_id="resp_1", **ASK)
    assert caught.value.param == "previous_response_id"
