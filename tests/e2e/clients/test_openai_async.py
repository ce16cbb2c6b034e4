"""The `openai` package's asynchronous client, many calls at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import openai
import pytest

from tests.e2e.clients.conftest import API_KEY, MODEL
from tests.e2e.clients.schemas import GetWeather, Place

T = TypeVar("T")
Ask = Callable[[Callable[[openai.AsyncOpenAI], Awaitable[T]]], T]
GREEDY: dict = {"model": MODEL, "temperature": 0, "max_tokens": 12}
MESSAGES: list = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def ask(base_url: str) -> Ask:
    """Runs a coroutine with a client of its own."""

    def run(work: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
        async def main() -> T:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=API_KEY, max_retries=0, timeout=30) as client:
                return await work(client)

        return asyncio.run(main())

    return run


def test_models_and_completions_at_once(ask: Ask):
    async def work(client: openai.AsyncOpenAI):
        prompts = [f"prompt number {i}" for i in range(12)]
        alone = [(await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text for prompt in prompts]
        together = await asyncio.gather(*(client.completions.create(prompt=prompt, **GREEDY) for prompt in prompts))
        assert [reply.choices[0].text for reply in together] == alone
        assert [card.id async for card in client.models.list()] == [MODEL]

    ask(work)


def test_streams_at_once_with_usage(ask: Ask):
    async def one(client: openai.AsyncOpenAI, number: int):
        messages: list = [{"role": "user", "content": f"say {number}"}]
        whole = await client.chat.completions.create(messages=messages, **GREEDY)
        options: dict = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(messages=messages, **options, **GREEDY)
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def work(client: openai.AsyncOpenAI):
        await asyncio.gather(*(one(client, number) for number in range(8)))

    ask(work)


def test_structured_output_and_tools(ask: Ask):
    async def work(client: openai.AsyncOpenAI):
        base: dict = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200}
        parsed = await client.chat.completions.parse(**base, response_format=Place)
        assert isinstance(parsed.choices[0].message.parsed, Place)
        tools = [openai.pydantic_function_tool(GetWeather)]
        named: dict = {"type": "function", "function": {"name": "GetWeather"}}
        async with client.chat.completions.stream(**base, tools=tools, tool_choice=named) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, GetWeather)

    ask(work)


def test_responses(ask: Ask):
    async def work(client: openai.AsyncOpenAI):
        fields: dict = {"model": MODEL, "input": "Hi", "temperature": 0, "max_output_tokens": 8}
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text

    ask(work)


def test_errors(ask: Ask):
    async def work(client: openai.AsyncOpenAI):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="a")

    ask(work)


def test_cancelled_calls_leave_nothing(ask: Ask):
    """The `ring` fixture finds both pools full afterwards."""

    async def consume(client: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore):
        extra = {"ignore_eos": True}
        fields: dict = {"model": MODEL, "prompt": f"{number}", "max_tokens": 900, "extra_body": extra}
        async for _ in await client.completions.create(**fields, stream=True):
            begun.release()

    async def work(client: openai.AsyncOpenAI):
        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(consume(client, number, begun)) for number in range(6)]
        async with asyncio.timeout(20):
            for _ in range(24):
                await begun.acquire()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}

    ask(work)
