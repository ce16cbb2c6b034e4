"""/v1/responses: the order of its events, items in and out, what is refused, and the SDK that reads it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.errors import ErrorKind
from tests.server_rig import (
    MODEL_NAME,
    FakeNode,
    RunningServer,
    answers,
    fails,
    running_server,
    write_model_directory,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = "Grüße 👍"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    }
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    node.max_model_len = 1000
    with running_server(write_model_directory(tmp_path_factory.mktemp("model"), temperature=0.7), [node.address]) as up:
        up.wait_ready()
        yield node, up
    node.close()


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer]) -> RunningServer:
    return shared[1]


@pytest.fixture
def node(shared: tuple[FakeNode, RunningServer]) -> FakeNode:
    node, server = shared
    node.generates.clear()
    node.script = says(server, TEXT)
    return node


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(server: RunningServer, text: str, finish_reason: str = "stop") -> Any:
    end = "<|im_end|>" if finish_reason == "stop" else ""
    return answers(server.encode(text + end), finish_reason=finish_reason, num_cached_tokens=1)


def post(server: RunningServer, **body: Any) -> httpx.Response:
    return server.client.post("/v1/responses", json={"model": MODEL_NAME, "input": "Hi", **body})


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    """The response, which is one in the SDK's own strict types."""
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    parsed: dict[str, Any] = reply.json()
    return parsed


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The events, numbered without a gap, each one in the SDK's own strict types and under its own name."""
    reply = post(server, stream=True, **body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types without the prefix, neighbours that are equal as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for position, name in enumerate(names) if position == 0 or names[position - 1] != name]


def prompt_of(node: FakeNode, server: RunningServer) -> str:
    return server.decode(node.generates[-1].prompt_token_ids)


def comparable(value: Any) -> Any:
    """Without what differs from one response to the next."""
    if isinstance(value, dict):
        volatile = ("id", "call_id", "created_at", "completed_at")
        return {name: comparable(item) for name, item in value.items() if name not in volatile}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def test_a_text(node: FakeNode, server: RunningServer) -> None:
    response = create(
        server, instructions="Be brief.", metadata={"a": "b"}, store=True, max_output_tokens=30, top_p=0.5
    )
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert (response["metadata"], response["store"], response["max_output_tokens"]) == ({"a": "b"}, False, 30)
    assert (response["temperature"], response["top_p"], response["tool_choice"]) == (0.7, 0.5, "auto")
    num_input, num_output = len(node.generates[0].prompt_token_ids), len(server.encode(TEXT)) + 1
    assert response["usage"] == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
    assert prompt_of(node, server) == "system\nBe brief.\nuser\nHi\nassistant\n"
    sampling = node.generates[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (30, 0.7, 0.5)


def test_the_id_is_the_clients(node: FakeNode, server: RunningServer) -> None:
    reply = server.client.post("/v1/responses", json={"input": "Hi"}, headers={"X-Request-Id": "mine"})
    assert reply.json()["id"] == "resp_mine"
    assert reply.headers["x-request-id"] == "mine"


def test_the_events_of_a_text(node: FakeNode, server: RunningServer) -> None:
    events = stream(server)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == TEXT
    assert [event["text"] for event in events if event["type"] == "response.output_text.done"] == [TEXT]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    assert events[-2]["item"] == events[-1]["response"]["output"][0]
    assert comparable(events[-1]["response"]) == comparable(create(server))


def test_calls_between_texts(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, f"Let me see. {CALL} {CALL} Done.")
    events = stream(server, tools=TOOLS)
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    done = ["output_item.done"]
    assert kinds(events)[2:-1] == [*message, *done, *call, *done, *call, *done, *message, *done]
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "function_call", "message"]
    first, second = final["output"][1:3]
    assert (first["name"], first["arguments"], first["status"]) == ("get_weather", '{"city": "Köln"}', "completed")
    assert first["call_id"] != second["call_id"]
    deltas = [
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 1
    ]
    assert "".join(deltas) == first["arguments"]
    assert comparable(final) == comparable(create(server, tools=TOOLS))
    assert final["tools"] == TOOLS


def test_what_was_cut_short_is_incomplete(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, TEXT, "length")
    events = stream(server)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert comparable(response) == comparable(create(server))


def test_an_answer_of_nothing_is_an_empty_message(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, "")
    (item,) = create(server)["output"]
    assert item["content"][0]["text"] == ""
    assert kinds(stream(server))[2:-1] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip


def test_an_error_in_mid_stream(node: FakeNode, server: RunningServer) -> None:
    def script(node: FakeNode, generate: Any) -> None:
        node.send_output(generate.request_id, server.encode("Hi"))
        fails(ErrorKind.INTERNAL, "broke")(node, generate)

    node.script = script
    events = stream(server)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "broke"})
    node.script = fails(ErrorKind.OVERLOADED)
    assert post(server, stream=True).status_code == 429


def test_items_in(node: FakeNode, server: RunningServer) -> None:
    call = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Köln"}', "id": "fc_1"}
    create(
        server,
        input=[
            {"role": "developer", "content": "Rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": "So", "annotations": []}],
            },
            {**call, "call_id": "1"},
            {**call, "call_id": "2", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "sun"}]},
        ],
    )  # fmt: skip
    assert prompt_of(node, server) == (
        "system\nRules\nuser\nHi\nassistant\nSo\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\n'
        "user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\nassistant\n"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.message.content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.message.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": []}]}, "input.0"),
        ({"input": ["x"]}, "input.0"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "input.0.function_call.arguments",
        ),
        ({"input": "x" * 60_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        ({"tools": [{**TOOLS[0], "parameters": {"maximum": 10**30}}]}, "tools.0.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_is_refused_is_named(node: FakeNode, server: RunningServer, body: dict[str, Any], param: str) -> None:
    reply = post(server, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert param.split(".")[0] in error["message"]
    assert node.generates == []


def test_text_of_a_given_form(node: FakeNode, server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert create(server, text=asked)["text"] == asked
    grammar = node.generates[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    create(server, text={"format": {"type": "json_object"}})
    assert node.generates[-1].sampling.grammar is not None


def test_a_call_that_is_forced(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, '{"city": "Köln"}')
    response = create(server, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
    assert [(item["type"], item["arguments"]) for item in response["output"]] == [("function_call", '{"city": "Köln"}')]
    assert response["tool_choice"] == {"type": "function", "name": "get_weather"}


def test_neutral_fields(node: FakeNode, server: RunningServer) -> None:
    create(
        server, background=False, previous_response_id=None, include=["reasoning.encrypted_content"],
        truncation="disabled", reasoning={"effort": None, "summary": None}, tools=[],
        text={"format": {"type": "text"}, "verbosity": "medium"}, stream_options=None, service_tier="auto",
        user="me", store=False, frobnicate=1, seed=3, top_k=4,
    )  # fmt: skip
    assert (node.generates[0].sampling.seed, node.generates[0].sampling.top_k) == (3, 4)


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    assert post(server, model="gpt-9").status_code == 404


def test_the_openai_sdk_creates_and_streams(node: FakeNode, server: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL_NAME, input="Hi", instructions="Be brief.")
    assert response.output_text == TEXT
    with client.responses.stream(model=MODEL_NAME, input=[{"role": "user", "content": "Hi"}]) as events:
        snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        assert snapshots[-1] == TEXT
        assert events.get_final_response().output_text == TEXT
    plain = client.responses.create(model=MODEL_NAME, input="Hi", stream=True)
    assert next(iter(plain)).type == "response.created"
    plain.close()


def test_the_openai_sdk_goes_on_after_a_call(node: FakeNode, server: RunningServer, client: openai.OpenAI) -> None:
    node.script = says(server, CALL)
    with client.responses.stream(model=MODEL_NAME, input="Hi", tools=TOOLS) as events:
        response = events.get_final_response()
    (call,) = response.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Köln"}
    node.script = says(server, TEXT)
    history: Any = [
        {"role": "user", "content": "Hi"},
        *client.responses.create(model=MODEL_NAME, input="Hi", tools=TOOLS).output,
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert client.responses.create(model=MODEL_NAME, input=history, tools=TOOLS).output_text == TEXT


def test_the_openai_sdk_raises_its_errors(node: FakeNode, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL_NAME, input="Hi", previous_response_id="resp_1")
    node.script = fails(ErrorKind.OVERLOADED)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=MODEL_NAME, input="Hi", stream=True)
