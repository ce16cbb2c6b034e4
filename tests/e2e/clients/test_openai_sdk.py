"""The `openai` package: models, completions, chat and their streams."""

import openai
import pytest

from tests.e2e.clients.conftest import MODEL

MESSAGES: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something: 👍🏽 über"}]
GREEDY: dict = {"model": MODEL, "temperature": 0, "max_tokens": 12}
PROMPTS = ["once upon a time", [104, 101, 108, 108, 111]]


def test_models(client: openai.OpenAI):
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == card


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_and_its_stream_agree(client: openai.OpenAI, prompt):
    whole = client.completions.create(prompt=prompt, **GREEDY)
    assert (whole.object, whole.model) == ("text_completion", MODEL)
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(
        client.completions.create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("prompts", [["one", "two two"], [[111, 110, 101], [116, 119, 111, 32, 116, 119, 111]]])
def test_a_batch_is_its_prompts_one_by_one(client: openai.OpenAI, prompts: list):
    batch = client.completions.create(prompt=prompts, n=2, echo=True, **GREEDY)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    single = [client.completions.create(prompt=prompt, echo=True, **GREEDY) for prompt in prompts]
    expected = [reply.choices[0].text for reply in single for _ in range(2)]
    assert [choice.text for choice in batch.choices] == expected
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == sum(reply.usage.prompt_tokens for reply in single if reply.usage)


def test_stop_strings_end_an_answer(client: openai.OpenAI):
    text = client.completions.create(prompt="once upon", **GREEDY).choices[0].text
    stop = text[4:6]
    stopped = client.completions.create(prompt="once upon", stop=[stop], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_chat_and_its_stream_agree(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert choices[-1].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_sdk_s_own_accumulator_builds_the_same_answer(client: openai.OpenAI):
    text = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content or ""
    stop = text[-2:]  # what ends by length it refuses to parse
    with client.chat.completions.stream(messages=MESSAGES, stop=stop, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion().choices[0]
    assert final.message.content == "".join(deltas) == text[: text.index(stop)]
    assert final.finish_reason == "stop"


def test_several_choices_with_a_seed(client: openai.OpenAI):
    ask: dict = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    whole = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    assert len(set(whole)) == 3
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == whole


def test_logprobs_of_chat_and_completion(client: openai.OpenAI):
    reply = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert reply.usage is not None
    assert len(logprobs.content) == reply.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the best"
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    legacy = client.completions.create(prompt="once upon", logprobs=2, **GREEDY).choices[0].logprobs
    assert legacy is not None
    assert legacy.tokens
    assert len(legacy.tokens) == len(legacy.token_logprobs or ()) == len(legacy.top_logprobs or ())


def test_a_reply_goes_back_as_history(client: openai.OpenAI):
    message = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message
    history = [*MESSAGES, message, {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
    assert client.chat.completions.create(messages=history, **GREEDY).choices


def test_headers_of_whole_and_streamed_answers(client: openai.OpenAI):
    headers = {"X-Request-Id": "mine-17"}
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, extra_headers=headers, **GREEDY)
    assert raw.headers["x-request-id"] == "mine-17"
    assert raw.parse().id == "chatcmpl-mine-17"
    made = client.completions.create(prompt="a", **GREEDY)
    assert made._request_id is not None
    assert made.id == f"cmpl-{made._request_id}"
    streamed = client.completions.with_streaming_response.create(prompt="a", stream=True, **GREEDY)
    with streamed as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        assert list(response.parse())
