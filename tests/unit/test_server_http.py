"""What clients get: both endpoints, streamed and whole, over a real socket from a scripted decode node."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from connector.server_messages import TokenOutput, Tokens
from engine.request import SampledToken
from tests.server_rig import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    FakeNode,
    RunningServer,
    answers,
    events_of,
    running_server,
    wait_for,
    write_model_directory,
)

TEXT = "Hello 👍🏽 über 日本"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    directory = write_model_directory(tmp_path_factory.mktemp("model"), temperature=0.7, top_k=20)
    with running_server(directory, [node.address]) as server:
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
    node.cancelled.clear()
    node.script = answers(server.encode(TEXT))
    return node


def test_completion(node: FakeNode, server: RunningServer) -> None:
    body = server.complete(max_tokens=30).json()
    num_tokens = len(server.encode(TEXT))
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL_NAME
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": num_tokens,
        "total_tokens": 2 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat(node: FakeNode, server: RunningServer) -> None:
    body = server.chat().json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    prompt = server.decode(node.generates[0].prompt_token_ids)
    assert prompt == "user\nHi\nassistant\n"


def test_completion_stream(node: FakeNode, server: RunningServer) -> None:
    response = server.complete(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_chat_stream_opens_with_the_role(node: FakeNode, server: RunningServer) -> None:
    events = events_of(server.chat(stream=True))
    first, *rest = (event["choices"][0] for event in events)
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert "".join(choice["delta"].get("content", "") for choice in rest) == TEXT
    assert not any("role" in choice["delta"] for choice in rest)
    assert rest[-1]["finish_reason"] == "length"
    assert all(event["object"] == "chat.completion.chunk" for event in events)


def test_usage_comes_last_and_only_when_asked_for(node: FakeNode, server: RunningServer) -> None:
    events = events_of(server.chat(stream=True, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(server.encode(TEXT))
    assert not any("usage" in event for event in events[:-1])


def test_continuous_usage_counts_up(node: FakeNode, server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(server.chat(stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == len(server.encode(TEXT))


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_have_own_seeds_and_ids(node: FakeNode, server: RunningServer, stream: bool) -> None:
    response = server.chat(n=3, seed=5, stream=stream)
    assert [generate.sampling.seed for generate in node.generates] == [5, 6, 7]
    assert len({generate.request_id for generate in node.generates}) == 3
    choices = [c for event in events_of(response) for c in event["choices"]] if stream else response.json()["choices"]
    ends = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    if stream:
        assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
        for _, of_one in groupby(sorted(choices, key=lambda c: c["index"]), key=lambda c: c["index"]):
            assert "".join(choice["delta"].get("content", "") for choice in of_one) == TEXT
    else:
        assert server.chat(n=3).json()["usage"]["prompt_tokens"] == len(node.generates[0].prompt_token_ids)


def test_prompts_in_all_forms(node: FakeNode, server: RunningServer) -> None:
    ids = [server.encode("Paris"), server.encode("über")]
    for prompt, expected in [
        ("Paris", ids[:1]),
        (["Paris", "über"], ids),
        (ids[0], ids[:1]),
        (ids, ids),
    ]:
        node.generates.clear()
        body = server.complete(prompt=prompt).json()
        assert [list(generate.prompt_token_ids) for generate in node.generates] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(node: FakeNode, server: RunningServer, stream: bool) -> None:
    response = server.complete(prompt=["Hi", "Ho"], n=2, echo=True, stream=stream)
    choices = [c for event in events_of(response) for c in event["choices"]] if stream else response.json()["choices"]
    texts = {i: "".join(c["text"] for c in choices if c["index"] == i) for i in range(4)}
    assert texts == {0: "Hi" + TEXT, 1: "Hi" + TEXT, 2: "Ho" + TEXT, 3: "Ho" + TEXT}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(node: FakeNode, server: RunningServer, stream: bool) -> None:
    expected = server.encode(TEXT)
    response = server.complete(return_token_ids=True, stream=stream)
    choices = [e["choices"][0] for e in events_of(response)] if stream else response.json()["choices"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == expected
    assert choices[0]["prompt_token_ids"] == server.encode("Hi")
    response = server.chat(return_token_ids=True, stream=stream)
    events = events_of(response) if stream else [response.json()]
    assert events[0]["prompt_token_ids"] == list(node.generates[-1].prompt_token_ids)
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_cancels_at_the_node(
    node: FakeNode, server: RunningServer, stream: bool
) -> None:
    ids = server.encode("one two STOP three four five six seven")

    def goes_on_regardless(node: FakeNode, generate: Any) -> None:
        for token_id in ids:
            node.send_output(generate.request_id, [token_id])

    node.script = goes_on_regardless
    response = server.complete(stop=[" STOP", "never"], stream=stream)
    choices = [event["choices"][0] for event in events_of(response)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", " STOP")
    wait_for(lambda: node.cancelled == [node.generates[0].request_id])


def test_a_stop_string_can_be_kept_and_min_tokens_come_first(node: FakeNode, server: RunningServer) -> None:
    node.script = answers(server.encode("ab ab ab"))
    choice = server.complete(stop="ab", include_stop_str_in_output=True).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", "ab")
    choice = server.complete(stop="ab", min_tokens=3).json()["choices"][0]
    assert choice["text"].startswith("ab")
    assert choice["finish_reason"] == "stop"


def test_a_stop_token_is_not_part_of_the_text(node: FakeNode, server: RunningServer) -> None:
    stop_id = server.encode("!")[0]
    ids = [*server.encode("yes"), stop_id]
    node.script = answers(ids, finish_reason="stop", stop_reason=stop_id)
    body = server.complete(stop_token_ids=[stop_id]).json()
    assert body["choices"][0]["text"] == "yes"
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", stop_id)
    assert body["usage"]["completion_tokens"] == len(ids)
    assert node.generates[0].sampling.stop_token_ids == (stop_id,)
    body = server.complete(stop_token_ids=[stop_id], include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "yes!"


def test_an_unfinished_character_is_never_shown(node: FakeNode, server: RunningServer) -> None:
    node.script = answers(server.encode("ok 👍")[:-1])
    assert server.complete().json()["choices"][0]["text"] == "ok "
    texts = [event["choices"][0]["text"] for event in events_of(server.complete(stream=True))]
    assert "".join(texts) == "ok "


def scored(ids: list[int]) -> Any:
    def script(node: FakeNode, generate: Any) -> None:
        tokens = [SampledToken(token_id, -0.5, ((token_id, -0.5), (5, float("-inf")))) for token_id in ids]
        outputs = [TokenOutput(request_id=generate.request_id, tokens=tokens, finish_reason="length")]
        node.send(Tokens(outputs=outputs))

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(node: FakeNode, server: RunningServer, stream: bool) -> None:
    ids = server.encode("a👍")
    node.script = scored(ids)
    response = server.chat(logprobs=True, top_logprobs=2, stream=stream)
    choices = [event["choices"][0] for event in events_of(response)] if stream else response.json()["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "a👍".encode()
    assert entries[0]["token"] == "a"
    assert entries[1]["token"].startswith("bytes:\\x")
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert node.generates[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(node: FakeNode, server: RunningServer, stream: bool) -> None:
    ids = server.encode("a👍b")
    node.script = scored(ids)
    response = server.complete(logprobs=1, stream=stream)
    choices = [event["choices"][0] for event in events_of(response)] if stream else response.json()["choices"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0] + [1] * (len(ids) - 2) + [2]
    assert next(token for part in parts for token in part["tokens"]) == "a"
    assert [logprob for part in parts for logprob in part["token_logprobs"]] == [-0.5] * len(ids)
    assert next(top for part in parts for top in part["top_logprobs"]) == {"a": -0.5}


def test_sampling_fields_reach_the_node(node: FakeNode, server: RunningServer) -> None:
    server.complete(
        max_tokens=7, min_tokens=2, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=3, ignore_eos=True,
        repetition_penalty=1.1, presence_penalty=1, frequency_penalty=-1, logit_bias={"7": 5}, cache_salt="s",
    )  # fmt: skip
    sampling = node.generates[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (7, 2, 0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.ignore_eos) == (0, 0.1, 3, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (1, -1, {7: 5})
    assert node.generates[0].cache_salt == "s"


def test_defaults_come_from_the_checkpoint_then_from_openai(node: FakeNode, server: RunningServer) -> None:
    server.complete()
    server.complete(prompt=list(range(3, 3 + MAX_MODEL_LEN - 4)))
    server.chat()
    plain, long, chat = node.generates
    assert (plain.sampling.temperature, plain.sampling.top_k, plain.sampling.top_p) == (0.7, 20, 1.0)
    assert plain.sampling.max_tokens == 16
    assert long.sampling.max_tokens == 4
    assert chat.sampling.max_tokens == MAX_MODEL_LEN - len(chat.prompt_token_ids)
    assert plain.sampling.seed != long.sampling.seed


def test_cached_tokens_are_reported(node: FakeNode, server: RunningServer) -> None:
    node.script = answers(server.encode("ab"), num_cached_tokens=1)
    usage = server.complete(n=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_request_id_is_echoed_and_never_shared(node: FakeNode, server: RunningServer) -> None:
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "Hi", "max_tokens": 3}
    replies = [server.client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same"]
    assert [reply.json()["id"] for reply in replies] == ["cmpl-same", "cmpl-same"]
    assert len({generate.request_id for generate in node.generates}) == 2
    made = [server.complete().headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    odd = server.client.get("/health", headers={"X-Request-Id": "x" * 1000})
    assert len(odd.headers["x-request-id"]) == 32


def test_content_parts_and_the_developer_role(node: FakeNode, server: RunningServer) -> None:
    messages = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Al"},
    ]
    assert server.chat(messages=messages).status_code == 200
    assert server.decode(node.generates[0].prompt_token_ids) == "system\nRules\nuser\na\nb\nassistant\n"


def test_continue_final_message(node: FakeNode, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    server.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert server.decode(node.generates[0].prompt_token_ids).endswith("assistant\nSo")
    reply = server.chat(messages=messages, continue_final_message=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_long_prompt_is_tokenized_like_a_short_one(tmp_path: Any) -> None:
    node = FakeNode()
    node.max_model_len = 100_000
    text = "The quick brown fox über 日本 👍. " * 200
    with running_server(write_model_directory(tmp_path), [node.address]) as server:
        server.wait_ready()
        node.script = answers([65])
        assert server.complete(prompt=text).status_code == 200
        assert list(node.generates[0].prompt_token_ids) == server.assets.tokenizer.file.encode(text).ids
    node.close()


def test_models(server: RunningServer) -> None:
    body = server.client.get("/v1/models").json()
    assert [card["id"] for card in body["data"]] == [MODEL_NAME, "alias/of-it"]
    assert body["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert server.client.get("/v1/models/alias/of-it").json()["id"] == "alias/of-it"
    assert server.client.get("/v1/models/other").status_code == 404


def test_an_alias_answers_under_its_name(node: FakeNode, server: RunningServer) -> None:
    assert server.complete(model="alias/of-it").json()["model"] == "alias/of-it"
    assert server.complete(model=None).json()["model"] == MODEL_NAME


def test_probes(server: RunningServer) -> None:
    for path in ("/health", "/ping"):
        reply = server.client.get(path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert server.client.head(path).status_code == 200
    assert server.client.head("/ready").status_code == 200
    assert server.client.get("/ready").json()["ready"] is True
    assert server.client.get("/version").json()["version"]
    assert server.client.get("/openapi.json").status_code == 200


def test_tokenize_and_back(server: RunningServer) -> None:
    body = server.client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert body["tokens"] == server.encode(TEXT)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_MODEL_LEN)
    assert len(body["token_strs"]) == body["count"]
    assert server.client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": TEXT}
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    reply = server.client.post("/detokenize", json={"tokens": [5, 350]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
    messages = [{"role": "user", "content": "Hi"}]
    body = server.client.post("/tokenize", json={"messages": messages}).json()
    assert server.decode(body["tokens"]) == "user\nHi\nassistant\n"
    assert server.client.post("/tokenize", json={}).status_code == 400


def test_metrics(node: FakeNode, server: RunningServer) -> None:
    server.complete()
    text = server.client.get("/metrics").text
    labels = 'engine="0",finished_reason="length",model_name="tiny"'
    assert f"vllm:request_success_total{{{labels}}}" in text
    for name in ("prompt_tokens", "generation_tokens"):
        assert f'vllm:{name}_total{{engine="0",model_name="tiny"}}' in text
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"vllm:{name}_seconds_count" in text
    for name in ("running", "waiting"):
        assert f'vllm:num_requests_{name}{{engine="0",model_name="tiny"}} 0.0' in text
    wait_for(lambda: "pdserve_node_ready{" in server.client.get("/metrics").text)
