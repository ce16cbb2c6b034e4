import pytest

from engine.batch import Batch, BatchResult
from engine.engine import Engine
from engine.errors import PoolCorrupted, RequestError
from engine.request import RequestState
from tests.builders import (
    PagedWorker,
    ScriptedWorker,
    StubConnector,
    final_of,
    make_request,
    make_scheduler,
    run_until_idle,
    token_ids_of,
    undisturbed_output,
)


def test_requests_run_side_by_side_and_each_ends_once() -> None:
    engine = Engine(make_scheduler(), PagedWorker(64, 16))
    requests = [make_request(10 + 7 * i, max_tokens=1 + i) for i in range(8)]
    for request in requests:
        engine.add_request(request)
    outputs = run_until_idle(engine)
    for request in requests:
        assert final_of(outputs, request.request_id)
        assert token_ids_of(outputs, request.request_id) == undisturbed_output(request, 1000)


def test_six_requests_share_a_pool_for_two() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    engine = Engine(scheduler, PagedWorker(8, 4))
    requests = [make_request(13, max_tokens=10, ignore_eos=True) for _ in range(6)]
    for request in requests:
        engine.add_request(request)
    outputs = run_until_idle(engine)
    for request in requests:
        assert token_ids_of(outputs, request.request_id) == undisturbed_output(request, 32)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.pool.num_free == 8


def test_the_connector_is_served_in_every_step() -> None:
    connector = StubConnector(answers={"r": (33, True)})
    engine = Engine(make_scheduler(connector=connector), worker := ScriptedWorker(connector))
    engine.add_request(make_request(33, request_id="r", max_tokens=2))
    engine.step()
    assert not engine.has_work()
    assert not engine.is_idle()
    engine.step()  # nothing to schedule, but a transfer is open
    assert [batch.num_tokens for batch in worker.batches] == [0, 0]
    assert [batch.connector_metadata for batch in worker.batches] == [
        ("metadata of step", 1),
        ("metadata of step", 2),
    ]
    assert connector.taken_outputs == []
    connector.finish_load("r", 7)
    outputs = run_until_idle(engine)
    assert len(connector.taken_outputs) == 1
    assert token_ids_of(outputs, "r") == [7, 7]


def test_pending_metadata_is_work() -> None:
    connector = StubConnector()
    engine = Engine(make_scheduler(connector=connector), ScriptedWorker(connector))
    assert not engine.has_work()
    connector.has_pending_metadata = lambda: True
    assert engine.has_work()
    assert not engine.is_idle()


def test_abort_and_refusal_pass_through() -> None:
    engine = Engine(make_scheduler(), ScriptedWorker())
    with pytest.raises(RequestError):
        engine.add_request(make_request(0))
    engine.abort_request("unknown")
    engine.add_request(make_request(5, request_id="r"))
    engine.abort_request("r")
    assert final_of(engine.step(), "r").finish_state is RequestState.FINISHED_ABORTED
    assert engine.is_idle()


def test_the_pool_is_checked_when_idle() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler, ScriptedWorker())
    scheduler.pool.allocate(1)  # leaked
    engine.add_request(make_request(5, max_tokens=1))
    with pytest.raises(PoolCorrupted, match="idle, but only 63 of 64 blocks are free"):
        engine.step()


def test_a_worker_that_raises_ends_the_step() -> None:
    class Broken:
        def execute(self, batch: Batch) -> BatchResult:
            raise RuntimeError("no kernel")

    engine = Engine(make_scheduler(), Broken())
    engine.add_request(make_request(5))
    with pytest.raises(RuntimeError, match="no kernel"):
        engine.step()
