"""Tools as the `openai` package sends them and reads the calls."""

import json

import openai
import pytest
from openai import pydantic_function_tool

from tests.e2e.clients.conftest import MODEL
from tests.e2e.clients.schemas import GetWeather

TOOL = pydantic_function_tool(GetWeather, name="get_weather")
OTHER: dict = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
NAMED: dict = {"type": "function", "function": {"name": "get_weather"}}
ASK: dict = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Weather in Rome?"}],
    "tools": [TOOL],
    "max_tokens": 200,
    "temperature": 0,
}


def test_a_named_tool_is_called(client: openai.OpenAI):
    choice = client.chat.completions.create(**ASK, tool_choice=NAMED).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, bool(call.id)) == ("get_weather", True)
    GetWeather.model_validate_json(call.function.arguments)
    assert not choice.message.content
    assert choice.finish_reason in ("stop", "tool_calls")


def test_a_named_tool_streams_the_same_call(client: openai.OpenAI):
    (whole,) = client.chat.completions.create(**ASK, tool_choice=NAMED).choices[0].message.tool_calls or ()
    assert whole.type == "function"
    names, arguments = [], []
    for chunk in client.chat.completions.create(**ASK, tool_choice=NAMED, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.index == 0
            assert delta.function is not None
            names.append(delta.function.name)
            arguments.append(delta.function.arguments or "")
    assert [name for name in names if name] == ["get_weather"]
    assert "".join(arguments) == whole.function.arguments
    assert len([part for part in arguments if part]) > 3, "it came in one piece"


def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI):
    ask = {**ASK, "tools": [TOOL, OTHER]}
    reply = client.chat.completions.create(**ask, tool_choice="required", seed=4).choices[0]
    assert reply.finish_reason == "tool_calls"
    for call in reply.message.tool_calls or pytest.fail("no call"):
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            GetWeather.model_validate(arguments)
        else:
            assert (call.function.name, arguments) == ("now", {})


def test_the_sdk_parses_the_arguments(client: openai.OpenAI):
    reply = client.chat.completions.parse(**ASK, tool_choice=NAMED)
    (call,) = reply.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**ASK, tool_choice=NAMED) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]


def test_none_and_auto_may_answer_in_words(client: openai.OpenAI):
    ask = {**ASK, "max_tokens": 8}
    assert client.chat.completions.create(**ask, tool_choice="none").choices[0].message.content
    reply = client.chat.completions.create(**ask).choices[0].message
    assert reply.content or reply.tool_calls


def test_a_call_and_its_result_go_back_as_history(client: openai.OpenAI):
    message = client.chat.completions.create(**ASK, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": (message.tool_calls or ())[0].id, "content": "sunny"}
    ask = {**ASK, "messages": [*ASK["messages"], message, result], "max_tokens": 8}
    assert client.chat.completions.create(**ask, tool_choice="none").choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tool_choice": "perhaps"},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [], "tool_choice": "required"},
    ],
)
def test_what_names_no_tool_is_a_bad_request(client: openai.OpenAI, fields: dict):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, **fields})
    assert (caught.value.param or "").startswith("tool")
