"""Everything a client can get wrong: a clear message, the right status, the field's name, nothing sent to a node."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.http_settings import LimitsConfig
from tests.server_rig import (
    MAX_MODEL_LEN,
    FakeNode,
    RunningServer,
    answers,
    running_server,
    write_model_directory,
)

MAX_BODY = 100_000
LONG = "word " * (MAX_MODEL_LEN + 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    node.script = answers([65])
    directory = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server(directory, [node.address], limits=LimitsConfig(max_body_bytes=MAX_BODY)) as server:
        server.wait_ready()
        yield node, server
    node.close()


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer]) -> Iterator[RunningServer]:
    node, server = shared
    node.generates.clear()
    yield server
    assert node.generates == []


def error_of(reply: Any) -> tuple[int, str | None, str]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == reply.status_code
    return reply.status_code, error["param"], error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 3}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [350]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words.0"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"kv_transfer_params": 3}, "kv_transfer_params"),
    ],
)
def test_a_bad_field_is_named_by_both_endpoints(server: RunningServer, body: dict[str, Any], param: str) -> None:
    for reply in (server.complete(**body), server.chat(**body)):
        status, named, message = error_of(reply)
        assert (status, named) == (400, param)
        assert param.split(".")[0] in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 600, "n": 2}, "n"),
        ({"top_k": 2**64}, "top_k"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_bad_completions(server: RunningServer, body: dict[str, Any], param: str) -> None:
    status, named, _ = error_of(post_ascii(server, "/v1/completions", {"prompt": "Hi", **body}))
    assert (status, named) == (400, param)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: str) -> dict[str, Any]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | fields]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages.0"),
        (message(role=3), "messages.0.role"),
        (message(role=None), "messages.0.role"),
        (message(content=5), "messages.0.content"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content"),
        (message(content=["Hi"]), "messages.0.content"),
        (message(content="\udc00"), "messages.0.content"),
        (message(content=None), "messages"),
        (message(tool_calls=[{"id": "1"}]), "messages.0.tool_calls.0.function"),
        (called("[1]"), "messages.0.tool_calls.0.function.arguments"),
        (called("{'a': 1}"), "messages.0.tool_calls.0.function.arguments"),
        (called("[" * 5000), "messages.0.tool_calls.0.function.arguments"),
        (called('{"a": "\\ud800"}'), "messages.0.tool_calls.0.function.arguments"),
        (message() | {"tools": [{"type": "function"}]}, "tools.0.function"),
        (message() | {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        (message() | {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (message() | {"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (message() | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        (message() | {"tools": TOOLS, "tool_choice": named("g")}, "tool_choice"),
        (message() | {"tools": TOOLS, "tool_choice": named("f"), "guided_regex": "a"}, "tool_choice"),
        (message() | {"tool_choice": "required"}, "tool_choice"),
        (message() | {"tool_choice": named("f")}, "tool_choice"),
        (message() | {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (message() | {"documents": [{"text": "x"}]}, "documents"),
        (message() | {"guided_json": {"const": "\ud800"}}, "guided_json"),
        (message() | {"function_call": {"name": "f"}}, "function_call"),
        (message() | {"logprobs": 3}, "logprobs"),
        (message() | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (message() | {"top_logprobs": 2}, "top_logprobs"),
        (message() | {"max_completion_tokens": 0}, "max_tokens"),
        (message() | {"echo": 1}, "echo"),
        (message() | {"best_of": 2}, "best_of"),
        (message() | {"chat_template": "x"}, "chat_template"),
        (message() | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_bad_chats(server: RunningServer, body: dict[str, Any], param: str) -> None:
    status, named, _ = error_of(post_ascii(server, "/v1/chat/completions", body))
    assert (status, named) == (400, param)


def post_ascii(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    # Escaped, so that half of a surrogate pair survives the way.
    content = json.dumps(body, ensure_ascii=True)
    return server.client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("body", [{"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}])
def test_an_overlong_prompt_is_told_both_numbers(server: RunningServer, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    status, param, text = error_of(server.client.post(path, json=body))
    assert (status, [param]) == (400, list(body))
    assert str(MAX_MODEL_LEN) in text
    assert any(
        number in text for number in (str(len(server.encode(LONG))), str(len(LONG)), str(len(server.encode(LONG)) + 16))
    )


def test_an_absurdly_long_prompt_is_refused_before_it_is_tokenized(server: RunningServer) -> None:
    status, param, text = error_of(server.complete(prompt="x" * 90_000))
    assert (status, param) == (400, "prompt")
    assert "90000 characters" in text


def test_prompt_and_output_must_fit_together(server: RunningServer) -> None:
    status, param, text = error_of(server.complete(prompt=[65] * 10, max_tokens=MAX_MODEL_LEN))
    assert (status, param) == (400, "max_tokens")
    assert str(MAX_MODEL_LEN + 10) in text
    status, param, text = error_of(server.complete(prompt=[65] * MAX_MODEL_LEN))
    assert (status, param) == (400, "prompt")
    assert text.count(str(MAX_MODEL_LEN)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "JSON body is required"),
        (b"[1]", "body"),
        (b'"x"', "body"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON: it is not UTF-8"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"prompt": "x", "\\ud800": 1, "temperature": "x"}', "body"),
        (b'{"prompt": "x", "logit_bias": {"\\ud800": "x"}}', "logit_bias"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    ],
)
def test_bodies_that_are_no_request(server: RunningServer, content: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    status, _, text = error_of(server.client.post("/v1/completions", content=content, headers=headers))
    assert status == 400
    assert words in text


def test_other_content_types(server: RunningServer) -> None:
    reply = server.client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(reply)[0] == 415
    assert error_of(server.client.post("/v1/completions", data={"prompt": "x"}))[0] == 415


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(server: RunningServer, chunked: bool) -> None:
    content = json.dumps({"prompt": "x" * (MAX_BODY + 1)}).encode()
    reply = server.client.post(
        "/v1/completions", content=iter([content]) if chunked else content, headers={"content-type": "application/json"}
    )
    assert error_of(reply)[0] == 413


def test_unknown_model_path_and_method(server: RunningServer) -> None:
    assert error_of(server.complete(model="gpt-9"))[:2] == (404, "model")
    assert error_of(post_ascii(server, "/v1/completions", {"model": "\ud800", "prompt": "x"}))[0] == 400
    assert error_of(server.client.get("/v1/nothing"))[0] == 404
    reply = server.client.get("/v1/completions")
    assert error_of(reply)[0] == 405
    assert reply.headers["allow"] == "POST"


def test_unknown_and_neutral_fields_are_ignored(shared: tuple[FakeNode, RunningServer]) -> None:
    _, server = shared
    neutral: dict[str, Any] = {
        "frobnicate": {"a": [1]},
        "user": "me",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "suffix": None,
        "n": None,
        "stream_options": None,
        "best_of": None,
        "kv_transfer_params": None,
    }
    elsewhere: dict[str, Any] = {"messages": [{"role": "user"}, 1], "prompt": ["x", {}], "tokens": "x"}
    assert server.complete(**neutral).status_code == 200
    assert server.chat(**neutral).status_code == 200
    assert server.complete(**(elsewhere | {"prompt": "x"})).status_code == 200
    assert server.chat(**(elsewhere | {"messages": [{"role": "user", "content": "x"}]})).status_code == 200
