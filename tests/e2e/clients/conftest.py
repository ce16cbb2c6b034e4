"""One ring for the suites of all clients. Random weights: what is said does not matter here, how it is said does."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.processes import UpRing, running_up

MODEL = "tiny"
API_KEY = "sk-of-the-suites"
MAX_IN_FLIGHT = 32
"""Sequences; one more gets a 429."""


@pytest.fixture(scope="session")
def shared_ring(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRing]:
    flags = ("--model", str(tiny_llama), "--served-model-name", MODEL, "--num-blocks", "1024", "--block-size", "4")
    door = ("--api-key", API_KEY, "--max-in-flight", str(MAX_IN_FLIGHT))
    with running_up(tmp_path_factory.mktemp("clients"), *flags, *door) as ring:
        yield ring


@pytest.fixture
def ring(shared_ring: UpRing) -> Iterator[UpRing]:
    """Every test leaves both pools full."""
    yield shared_ring
    shared_ring.wait_until_quiescent()


@pytest.fixture
def base_url(ring: UpRing) -> str:
    return f"{ring.url}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=API_KEY, max_retries=0, timeout=30) as client:
        yield client
