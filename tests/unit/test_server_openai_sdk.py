"""The client most people bring."""

from collections.abc import Iterator

import openai
import pytest

from engine.errors import ErrorKind
from tests.server_rig import MODEL_NAME, FakeNode, RunningServer, answers, fails, running_server, write_model_directory

TEXT = "Hello 👍🏽 über"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), [node.address]) as server:
        server.wait_ready()
        yield node, server
    node.close()


@pytest.fixture
def node(shared: tuple[FakeNode, RunningServer]) -> FakeNode:
    node, server = shared
    node.script = answers(server.encode(TEXT))
    return node


@pytest.fixture
def client(shared: tuple[FakeNode, RunningServer]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared[1].url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(node: FakeNode, client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == MODEL_NAME
    assert client.models.retrieve(MODEL_NAME).owned_by == "pdserve"


def test_chat_and_its_stream(node: FakeNode, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].logprobs is not None
    assert reply.usage is not None
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[-1].usage == reply.usage


def test_a_reply_can_be_sent_back_as_history(node: FakeNode, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    history = [*MESSAGES, reply.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model=MODEL_NAME, messages=history).choices  # type: ignore[arg-type]


def test_completion_and_its_stream(node: FakeNode, client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL_NAME, prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in reply.choices] == [TEXT, TEXT]
    stream = client.completions.create(model=MODEL_NAME, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_error_classes(node: FakeNode, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    node.script = fails(ErrorKind.OVERLOADED)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    node.script = fails(ErrorKind.INTERNAL)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL_NAME, prompt="a", stream=True)


def test_an_error_in_mid_stream_is_raised(node: FakeNode, client: openai.OpenAI) -> None:
    def script(node: FakeNode, generate: object) -> None:
        node.send_output(node.generates[-1].request_id, [65])
        fails(ErrorKind.INTERNAL, "broke in the middle")(node, node.generates[-1])

    node.script = script
    with pytest.raises(openai.APIError, match="broke in the middle"):
        list(client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True))
