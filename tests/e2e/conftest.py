from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import UpRing, running_up
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="module")
def tiny_ring(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRing]:
    """A ring that the tests of one module share; each leaves it at rest."""
    flags = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--num-blocks", "256", "--block-size", "4")
    with running_up(tmp_path_factory.mktemp("tiny-ring"), *flags) as ring:
        yield ring
