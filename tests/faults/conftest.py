import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from connector import failpoints, node
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from tests.faults.rig import QUICK, assert_at_rest_soon, assert_books_balance, fault_ring
from tests.oracle import Oracle
from tests.poison import Poison
from tests.ring import Ring, running_ring, wait_until
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def poisoned_blocks() -> Iterator[None]:
    """In every node of this process, what holds nothing holds NaN."""
    build = node.build_engine

    def build_poisoned(*args: object) -> Engine:
        engine = build(*args)
        Poison(engine)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "build_engine", build_poisoned)
        yield


@pytest.fixture(scope="session", autouse=True)
def process_is_warm(tiny_llama: Path, poisoned_blocks: None) -> None:
    """What the libraries open once and keep is open before anybody counts files."""
    with running_ring(tiny_llama) as ring:
        ring.client.generate([1, 2, 3], SamplingParams(max_tokens=1))


@pytest.fixture(autouse=True)
def nothing_is_left(process_is_warm: None) -> Iterator[None]:
    """No fail-point, file or socket."""
    gc.collect()
    before = _open_files()
    yield
    failpoints.disarm_all()
    gc.collect()
    try:
        wait_until(lambda: not _open_files() - before, "files and sockets are closed", 3.0)
    except AssertionError as error:
        raise AssertionError(f"still open: {_open_files() - before}") from error


def _open_files() -> Counter[str]:
    """How many of each kind this process has open."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").rpartition(":")[0] or "file"] += 1
    return kinds


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["zmq", "shm"])
def shared_ring(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Ring]:
    with fault_ring(tiny_llama, transport=request.param, early_admission=False, **QUICK) as ring:
        yield ring


@pytest.fixture
def ring(shared_ring: Ring) -> Iterator[Ring]:
    """One ring for a module's tests, in the usual settings; each leaves it at rest."""
    threads = threads_of(shared_ring)
    yield shared_ring
    failpoints.disarm_all()
    assert_at_rest_soon(shared_ring)
    assert_books_balance(shared_ring)
    wait_until(lambda: threads_of(shared_ring) == threads, "the threads of before")


def threads_of(ring: Ring) -> list[str]:
    return ring.decode.state()["threads"]
