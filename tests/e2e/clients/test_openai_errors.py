"""Errors as the `openai` package raises them, and what is left when a client gives up."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.clients.conftest import API_KEY, MAX_IN_FLIGHT, MODEL
from tests.e2e.processes import UpRing, start_command, wait_until
from tests.faults.processes import free_ports

MESSAGES: list = [{"role": "user", "content": "Hi"}]
ENDLESS: dict = {"model": MODEL, "prompt": "go on", "max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 1000}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_its_field(client: openai.OpenAI, fields: dict, param: str, stream: bool):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields}, stream=stream)
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert caught.value.request_id


def test_an_unknown_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.files.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_an_authentication_error(base_url: str, stream: bool):
    with openai.OpenAI(base_url=base_url, api_key=API_KEY[:-1], max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_too_many_at_once_is_a_rate_limit_error(ring: UpRing, client: openai.OpenAI):
    with client.completions.create(**ENDLESS, n=MAX_IN_FLIGHT, stream=True) as stream:
        next(stream)
        for more_stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=more_stream)
            assert int(caught.value.response.headers["retry-after"]) >= 1
    ring.wait_until_quiescent()
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).choices


@pytest.fixture
def lonely_client(tiny_llama: Path) -> Iterator[openai.OpenAI]:
    """Of a server whose decode node is not there."""
    port, node_port = free_ports(2)
    node = ("--decode", f"tcp://127.0.0.1:{node_port}")
    server = start_command("server", "--model", str(tiny_llama), "--port", str(port), *node)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), "it listens", 30)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=10) as client:
            yield client
    finally:
        server.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_without_a_node_the_server_is_unavailable(lonely_client: openai.OpenAI, tiny_llama: Path):
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            lonely_client.chat.completions.create(model=str(tiny_llama), messages=MESSAGES, stream=stream)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_nobody_listens():
    (port,) = free_ports(1)
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=API_KEY, max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def num_running(ring: UpRing) -> int:
    return ring.state("decode-0")["queues"]["running"]


def test_leaving_a_stream_stops_the_work(ring: UpRing, client: openai.OpenAI):
    with client.completions.create(**ENDLESS, stream=True) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
        wait_until(lambda: num_running(ring) == 1, "it runs")
    ring.wait_until_quiescent()


def test_a_client_s_timeout_stops_the_work(ring: UpRing, client: openai.OpenAI):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**ENDLESS, timeout=0.2)
    ring.wait_until_quiescent()
