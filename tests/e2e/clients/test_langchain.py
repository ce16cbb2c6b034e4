"""LangChain's `ChatOpenAI` and `OpenAI`."""

import asyncio

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.e2e.clients.conftest import API_KEY, MODEL
from tests.e2e.clients.schemas import GetWeather, Place

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Hi")]


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=base_url, api_key=API_KEY, max_retries=0, timeout=30, temperature=0, max_tokens=12
    )


def test_invoke_stream_and_batch_agree(chat: ChatOpenAI):
    whole = chat.invoke(MESSAGES)
    assert isinstance(whole, AIMessage)
    assert whole.usage_metadata is not None
    assert whole.response_metadata["model_name"] == MODEL
    chunks = list(chat.stream(MESSAGES, stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [reply.content for reply in chat.batch([MESSAGES, MESSAGES])] == [whole.content] * 2
    assert asyncio.run(chat.ainvoke(MESSAGES)).content == whole.content


def test_a_plain_completion(base_url: str):
    model = OpenAI(model=MODEL, base_url=base_url, api_key=API_KEY, max_retries=0, temperature=0, max_tokens=8)
    assert model.invoke("once upon") == "".join(model.stream("once upon"))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method):
    structured = chat.with_structured_output(Place, method=method).bind(max_tokens=200)
    assert isinstance(structured.invoke(MESSAGES), Place)


def test_bound_tools_are_called_whole_and_streamed(chat: ChatOpenAI):
    bound = chat.bind_tools([GetWeather], tool_choice="GetWeather").bind(max_tokens=200)
    whole = bound.invoke(MESSAGES)
    (call,) = whole.tool_calls
    assert call["name"] == "GetWeather"
    GetWeather.model_validate(call["args"])
    chunks = list(bound.stream(MESSAGES))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(call["name"], call["args"])]
    history = [*MESSAGES, whole, ToolMessage("sunny", tool_call_id=call["id"])]
    assert chat.bind_tools([GetWeather]).invoke(history, max_tokens=4) is not None


def test_errors_are_those_of_the_openai_package(base_url: str, chat: ChatOpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.invoke(MESSAGES, temperature=-1)
    unknown = ChatOpenAI(model="gpt-9", base_url=base_url, api_key=API_KEY, max_retries=0)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        unknown.invoke(MESSAGES)
    stranger = ChatOpenAI(model=MODEL, base_url=base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.invoke(MESSAGES)
