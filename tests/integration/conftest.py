from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracle import Oracle
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)
