"""Tool calls of a real model, through the SDK, over both endpoints."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import running_up

FUNCTION = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def question(city: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the weather in {city}?"}


def asked_before(city: str) -> list[dict[str, Any]]:
    # A model this small calls only what it has seen called.
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        question(city),
        {"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": function}]},
    ]


@pytest.mark.demo_model
def test_the_demo_model_calls_a_function(tmp_path: Path):
    chat = [*asked_before("Rome"), *asked_before("Berlin"), *asked_before("Oslo"), question("Paris")]
    ask: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0}
    with (
        running_up(tmp_path, "--dtype", "float32") as ring,
        openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none") as client,
    ):
        tools: Any = [{"type": "function", "function": FUNCTION}]
        whole = client.chat.completions.create(**ask, messages=chat, tools=tools, max_tokens=60).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        chunks = client.chat.completions.create(**ask, messages=chat, tools=tools, max_tokens=60, stream=True)
        deltas = [part.function for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(part.arguments for part in deltas) == call.function.arguments
        assert len(deltas) > 3, "the arguments came in one piece"

        forced = client.chat.completions.create(
            **ask, messages=[question("Paris")], tools=tools, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert forced.finish_reason == "tool_calls"
        (call_of_many,) = forced.message.tool_calls
        assert isinstance(json.loads(call_of_many.function.arguments)["city"], str)
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        stream = client.chat.completions.create(
            **ask, messages=[question("Paris")], tools=tools, tool_choice=named, stream=True
        )
        parts = [part.function.arguments for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
        assert isinstance(json.loads("".join(parts))["city"], str)

        items = [item for turn in chat for item in as_items(turn)]
        with client.responses.stream(
            **ask, input=items, tools=[{"type": "function", "strict": False, **FUNCTION}], max_output_tokens=60
        ) as events:
            (item,) = events.get_final_response().output
        assert (item.type, item.arguments) == ("function_call", call.function.arguments)
        ring.wait_until_quiescent()


def as_items(turn: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in turn.get("tool_calls", ())
    ]
    return calls or [turn]
