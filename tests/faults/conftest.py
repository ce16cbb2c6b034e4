from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connector import failpoints, node
from engine.engine import Engine
from tests.oracle import Oracle
from tests.poison import Poison
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every node of this process, what holds nothing holds NaN."""
    build = node.build_engine

    def build_poisoned(*args: object) -> Engine:
        engine = build(*args)
        Poison(engine)
        return engine

    monkeypatch.setattr(node, "build_engine", build_poisoned)


@pytest.fixture(autouse=True)
def no_failpoint_is_left() -> Iterator[None]:
    yield
    failpoints.disarm_all()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param
