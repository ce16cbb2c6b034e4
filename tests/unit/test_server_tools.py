"""Tools over HTTP: what the model is shown, and its calls as the client gets them, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from connector.server_messages import TokenOutput, Tokens
from engine.errors import ErrorKind
from engine.request import SampledToken
from server.chat_settings import ChatConfig
from tests.server_rig import (
    MODEL_NAME,
    FakeNode,
    RunningServer,
    answers,
    events_of,
    fails,
    running_server,
    write_model_directory,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "add"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 👍"}}\n</tool_call>'
SECOND = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for d in documents or [] %}{{ d.text }}\n"
    "{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.items() | list }}{% endfor %}|{% endfor %}"
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    node.max_model_len = 1000
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server(directory, [node.address], chat=ChatConfig(trust_request_chat_template=True)) as server:
        server.wait_ready()
        yield node, server
    node.close()


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer]) -> RunningServer:
    return shared[1]


@pytest.fixture
def node(shared: tuple[FakeNode, RunningServer]) -> FakeNode:
    node, server = shared
    node.generates.clear()
    node.script = says(server, f"Let me see. {CALL}\n{SECOND}")
    return node


def says(server: RunningServer, text: str, finish_reason: str = "stop") -> Any:
    """A script: `text`, and where the model stops by itself the token that says so."""
    end = ["<|im_end|>"] if finish_reason == "stop" else []
    return answers(server.encode("".join([text, *end])), finish_reason=finish_reason)


def prompt_of(node: FakeNode, server: RunningServer) -> str:
    return server.decode(node.generates[-1].prompt_token_ids)


def joined_deltas(events: list[dict[str, Any]], index: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a choice, joined as a client does; fails where a call's first delta is not complete."""
    content, calls = "", []
    for delta in (c["delta"] for event in events for c in event["choices"] if c["index"] == index):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: call[name] for name in ("type", "function")} for call in calls]


def test_calls_in_one_piece(node: FakeNode, server: RunningServer) -> None:
    (choice,) = server.chat(tools=TOOLS).json()["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see. "
    assert without_ids(message["tool_calls"]) == [
        {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln 👍"}'}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert all(call_id.startswith("call_") for call_id in ids)
    assert len(set(ids)) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_calls_alone_have_no_content_and_may_be_cut_short(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, CALL.partition("👍")[0], "length")
    (choice,) = server.chat(tools=TOOLS).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln '


def test_the_stream_has_the_same_calls(node: FakeNode, server: RunningServer) -> None:
    whole = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    events = events_of(server.chat(tools=TOOLS, stream=True, n=2))
    for index in (0, 1):
        content, calls = joined_deltas(events, index)
        assert content == whole["content"]
        assert without_ids(calls) == without_ids(whole["tool_calls"])
    assert all("<" not in (c["delta"].get("content") or "") for event in events for c in event["choices"])
    assert len(events) > 10


def test_the_finishing_chunk_of_calls(node: FakeNode, server: RunningServer) -> None:
    events = events_of(server.chat(tools=TOOLS, stream=True))
    ends = [c for event in events for c in event["choices"] if c["finish_reason"]]
    assert [(c["delta"], c["finish_reason"]) for c in ends] == [({}, "tool_calls")]
    assert events[-1]["choices"] == ends
    assert events[-1]["system_fingerprint"].startswith("pdserve-")
    assert not any("system_fingerprint" in event for event in events[:-1])


def test_without_calls_a_chat_with_tools_is_any_chat(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, "a < b <tool")
    (choice,) = server.chat(tools=TOOLS).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a < b <tool", "refusal": None}
    events = events_of(server.chat(tools=TOOLS, stream=True))
    assert joined_deltas(events) == ("a < b <tool", [])
    assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == "stop"
    node.script = says(server, CALL)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert server.chat(**body).json()["choices"][0]["message"]["content"] == CALL
        assert "get_weather" not in prompt_of(node, server)


def test_one_call_at_most(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, f"{CALL}\n{SECOND}")
    message = server.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("name", ["required", "get_weather"])
def test_calls_that_are_forced(node: FakeNode, server: RunningServer, name: str) -> None:
    arguments = '{"city": "Köln 👍"}'
    is_named = name != "required"
    choice: Any = {"type": "function", "function": {"name": name}} if is_named else name
    node.script = says(server, arguments if is_named else f'[{{"name": "get_weather", "parameters": {arguments}}}]')
    (whole,) = server.chat(tools=TOOLS, tool_choice=choice).json()["choices"]
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    assert without_ids(whole["message"]["tool_calls"]) == calls
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    content, streamed = joined_deltas(events_of(server.chat(tools=TOOLS, tool_choice=choice, stream=True)))
    assert (content, without_ids(streamed)) == ("", calls)
    grammar = node.generates[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["type"] == ("object" if is_named else "array")


@pytest.mark.parametrize(("stop", "reason"), [("city", "stop"), ("}", "stop"), ("]", "tool_calls")])
def test_a_call_that_a_stop_string_cuts_is_not_told_as_whole(
    node: FakeNode, server: RunningServer, stop: str, reason: str
) -> None:
    node.script = says(server, '[{"name": "get_weather", "parameters": {"city": "Rome"}}]')
    for stream in (False, True):
        reply = server.chat(tools=TOOLS, tool_choice="required", stop=[stop], stream=stream)
        choices = [c for event in events_of(reply) for c in event["choices"]] if stream else reply.json()["choices"]
        assert choices[-1]["finish_reason"] == reason


def test_logprobs_and_token_ids_of_calls_are_complete(node: FakeNode, server: RunningServer) -> None:
    ids = server.encode(f"Hi {CALL}")

    def script(node: FakeNode, generate: Any) -> None:
        tokens = [SampledToken(token_id, -0.5, [(token_id, -0.5)]) for token_id in ids]
        for token in tokens[:-1]:
            node.send(Tokens(outputs=[TokenOutput(request_id=generate.request_id, tokens=[token])]))
        last = TokenOutput(request_id=generate.request_id, tokens=tokens[-1:], finish_reason="length")
        node.send(Tokens(outputs=[last]))

    node.script = script
    events = events_of(server.chat(tools=TOOLS, stream=True, logprobs=True, return_token_ids=True))
    choices = [c for event in events for c in event["choices"]]
    assert [token_id for c in choices for token_id in c.get("token_ids", ())] == ids
    assert sum(len((c["logprobs"] or {"content": ()})["content"]) for c in choices) == len(ids)


def test_a_template_without_tools_is_told_of_them_in_the_system_message(node: FakeNode, server: RunningServer) -> None:
    server.chat(tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    prompt = prompt_of(node, server)
    assert prompt.startswith("system\nBe brief.\n\n")
    shown = {name: value for name, value in TOOLS[0]["function"].items() if name != "strict"}
    assert f"\n{json.dumps(shown)}\n" in prompt
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument_name": "value"}}\n</tool_call>' in prompt
    server.chat(tools=TOOLS)
    assert prompt_of(node, server).count("system\n") == 1


def history() -> list[dict[str, Any]]:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}

    return [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("get_weather", '{"city": "Köln"}'), call("add", "")],
        },
        {"role": "tool", "tool_call_id": "call_get_weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_add", "content": [{"type": "text", "text": "3"}]},
    ]


def test_calls_and_their_answers_as_history(node: FakeNode, server: RunningServer) -> None:
    assert server.chat(messages=history()).status_code == 200
    assert prompt_of(node, server) == (
        'user\nHi\nassistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
        "user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\n3\n</tool_response>\nassistant\n"
    )


def test_a_template_with_tools_gets_them_as_objects(node: FakeNode, server: RunningServer) -> None:
    body = {"chat_template": TEMPLATE_WITH_TOOLS, "tools": TOOLS, "documents": [{"text": "Doc"}], "messages": history()}
    assert server.chat(**body).status_code == 200
    shown, bare, rest = prompt_of(node, server).split("\n", 2)
    assert json.loads(shown)["function"]["name"] == "get_weather"
    assert json.loads(bare) == TOOLS[1]
    assert rest == "Doc\nuser:Hi|assistant:get_weather[('city', 'Köln')]add[]|tool:rain|tool:3|"
    tokenized = server.client.post("/tokenize", json=body).json()["tokens"]
    assert tokenized == list(node.generates[-1].prompt_token_ids)


def test_a_bad_request_template_is_named(node: FakeNode, server: RunningServer) -> None:
    for template in ("{% for %}", "{{ messages[9].x.y }}"):
        assert server.chat(chat_template=template).status_code == 400
    assert server.chat(chat_template="{% for %}").json()["error"]["param"] == "chat_template"


def test_echo_begins_with_the_final_message(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, " be it")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    body = {"messages": messages, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    assert server.chat(**body).json()["choices"][0]["message"]["content"] == "So be it"
    deltas = [c["delta"] for event in events_of(server.chat(stream=True, **body)) for c in event["choices"]]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "So"}]
    assert "".join(delta.get("content", "") for delta in deltas) == "So be it"
    assert server.chat(echo=True).json()["choices"][0]["message"]["content"] == " be it"


@pytest.mark.parametrize("parser", ["mistral", "llama3_json"])
def test_markers_that_are_special_tokens_reach_the_parser(tmp_path: Path, parser: str) -> None:
    directory = write_model_directory(tmp_path)
    # As in the checkpoints of these models: the marker is a special token, hidden from text.
    marker = {"mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}[parser]
    tokenizer = (directory / "tokenizer.json").read_text().replace("<|endoftext|>", marker)
    (directory / "tokenizer.json").write_text(tokenizer)
    node = FakeNode()
    node.max_model_len = 1000
    with running_server(directory, [node.address]) as server:
        server.wait_ready()
        other = server.assets.tokenizer.file.token_to_id("<|im_start|>")
        ids = server.encode(f'{marker}{{"name": "add", "arguments": {{"a": "é"}}}}')
        node.script = answers([*ids[:5], other, *ids[5:]])
        message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": "é"}'}]
        assert marker not in server.chat().json()["choices"][0]["message"]["content"]
    node.close()


def test_the_openai_sdk_reads_calls(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, f"{CALL}\n{SECOND}")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        reply = client.chat.completions.create(model=MODEL_NAME, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        calls = reply.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln 👍"}, {"a": 1}]
        with client.chat.completions.stream(model=MODEL_NAME, messages=messages, tools=TOOLS[1:]) as stream:  # type: ignore[arg-type]
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.tool_calls is not None
        assert [call.function.arguments for call in streamed.tool_calls] == ['{"a": 1}']
        # What came back goes back as history.
        answered = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
        again = [*messages, reply.choices[0].message, *answered]
        assert client.chat.completions.create(model=MODEL_NAME, messages=again, tools=TOOLS).choices  # type: ignore[call-overload]


def test_the_order_of_chunks(node: FakeNode, server: RunningServer) -> None:
    node.script = says(server, f"Hi {CALL}")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(server.chat(tools=TOOLS, stream=True, n=2, stream_options=options))
    *chunks, usage = events
    roles = [(c["index"], c["delta"].get("role")) for event in chunks for c in event["choices"]]
    assert roles[:2] == [(0, "assistant"), (1, "assistant")]
    assert all(role is None for _, role in roles[2:])
    for index in (0, 1):
        reasons = [c["finish_reason"] for event in chunks for c in event["choices"] if c["index"] == index]
        assert reasons[-1] == "tool_calls"
        assert not any(reasons[:-1])
    assert [event["usage"]["completion_tokens"] for event in chunks][:2] == [0, 0]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert usage["choices"] == []
    assert usage["usage"] == chunks[-1]["usage"]
    assert usage["system_fingerprint"] == server.chat().json()["system_fingerprint"]
    assert not any("system_fingerprint" in event for event in chunks)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1


def test_done_comes_last_after_an_error_too(node: FakeNode, server: RunningServer) -> None:
    def script(node: FakeNode, generate: Any) -> None:
        node.send_output(generate.request_id, server.encode("Hi <tool"))
        fails(ErrorKind.INTERNAL, "broke")(node, generate)

    node.script = script
    events = events_of(server.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert events[-1]["error"]["message"] == "broke"
    assert joined_deltas(events[:-1]) == ("Hi ", [])
