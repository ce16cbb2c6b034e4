"""The scheduler with a connector: loads, ships, pins, failures, late reports."""

from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.errors import ErrorKind, RequestError
from engine.request import RequestState
from tests.builders import (
    EOS,
    PagedWorker,
    StubConnector,
    StubTransfer,
    final_of,
    make_request,
    make_scheduler,
    run_until_idle,
    token_ids_of,
    undisturbed_output,
)

S = RequestState


class Rig:
    """Scheduler, scripted connector, and a worker whose output shows whether every block held the right KV."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 16, **settings) -> None:
        self.connector = StubConnector()
        self.scheduler = make_scheduler(
            num_blocks=num_blocks, block_size=block_size, connector=self.connector, **settings
        )
        self.worker = PagedWorker(num_blocks, block_size, self.connector)
        self.engine = Engine(self.scheduler, self.worker)
        self.outputs = []

    def add(self, num_tokens: int = 33, *, answer=None, **fields):
        request = make_request(num_tokens, **{"max_tokens": 4, "ignore_eos": True, **fields})
        if answer is not None:
            self.connector.answers[request.request_id] = answer
        self.engine.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        self.outputs += self.engine.step()
        return {request.request_id: len(request.token_ids) for request in self.worker.batches[-1].requests}

    def finish_load(self, request_id: str, *, first_token: bool = False, **result) -> None:
        load = self.connector.loads[request_id]
        self.worker.fill(load)
        token_id = undisturbed_output(load.request, 1000)[0] if first_token else None
        self.connector.finish_load(request_id, token_id, **result)

    def final(self, request):
        return final_of(self.outputs, request.request_id)

    def assert_undisturbed(self, *requests) -> None:
        for request in requests:
            assert token_ids_of(self.outputs, request.request_id) == undisturbed_output(request, 1000)
            assert self.final(request).finish_state in (S.FINISHED_LENGTH, S.FINISHED_STOPPED)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    rig.outputs += run_until_idle(rig.engine, max_steps=200)
    assert not rig.scheduler.has_work()
    rig.scheduler.check()
    assert (rig.scheduler.num_open_transfers, rig.scheduler.pool.num_held, rig.scheduler.pool.num_pinned) == (0, 0, 0)
    assert rig.scheduler.pool.num_free == rig.scheduler.pool.num_blocks
    ended = [output.request_id for output in rig.outputs if output.finish_state is not None]
    assert sorted(ended) == sorted(set(ended))
    assert sorted(rig.connector.finished) == sorted(ended)


def with_settings(**settings):
    return pytest.mark.parametrize("rig", [settings], indirect=True)


# What the connector is asked, and what its answers mean


@with_settings(block_size=1)
def test_w1_external_tokens_count_from_the_local_hit_on(rig: Rig) -> None:
    rig.add(prompt=range(3), max_tokens=1)
    rig.step()
    r = rig.add(prompt=range(10), request_id="r", answer=(5, True))
    assert rig.step() == {}
    assert rig.connector.asked[-1] == ("r", 3)
    assert (r.state, r.num_computed_tokens, r.num_external_tokens) == (S.WAITING_FOR_REMOTE_KVS, 8, 5)
    assert (rig.connector.loads["r"].start, rig.connector.loads["r"].end) == (3, 8)
    rig.finish_load("r")
    assert rig.step() == {}
    assert rig.step() == {"r": 2}
    run_to_the_end(rig)
    rig.assert_undisturbed(r)
    assert rig.scheduler.counters.prompt_tokens_loaded == 5


def run_to_the_end(rig: Rig) -> None:
    rig.outputs += run_until_idle(rig.engine, max_steps=200)


def test_an_undecided_connector_is_asked_again_and_nothing_changes(rig: Rig) -> None:
    r = rig.add(33, request_id="r", answer=(None, False))
    b = rig.add(33, request_id="b")
    for _ in range(3):
        assert rig.step().keys() == {"b"}
        assert (r.state, r.block_ids) == (S.WAITING, [])
    assert "r" not in [request_id for request_id, *_ in rig.connector.allocated]
    rig.connector.answers["r"] = (0, False)
    assert rig.step() == {"b": 1, "r": 33}
    assert [request_id for request_id, _ in rig.connector.asked] == ["r", "b", "r", "r", "r"]
    run_to_the_end(rig)
    rig.assert_undisturbed(r, b)


def test_those_put_aside_stay_in_front_in_order(rig: Rig) -> None:
    for name in "abc":
        rig.add(5, request_id=name, answer=(None, False))
    rig.add(5, request_id="d", max_tokens=9)
    rig.step()
    rig.add(5, request_id="e")
    rig.connector.answers.clear()
    assert list(rig.step()) == ["d", "a", "b", "c", "e"]


@with_settings(max_num_seqs=1)
def test_those_put_aside_go_before_those_without_room(rig: Rig) -> None:
    for name, answer in [("a", (None, False)), ("b", None), ("c", None)]:
        rig.add(5, request_id=name, answer=answer, max_tokens=2)
    assert list(rig.step()) == ["b"]
    assert [request.request_id for request in rig.scheduler._roster.waiting] == ["a", "c"]
    rig.connector.answers.clear()


def test_while_only_an_answer_is_awaited_there_is_no_work_but_no_idleness(rig: Rig) -> None:
    rig.add(5, request_id="r", answer=(None, False))
    assert rig.scheduler.has_work()
    rig.step()
    assert not rig.scheduler.has_work()
    assert not rig.scheduler.is_idle()
    rig.connector.answers.clear()


@pytest.mark.parametrize("num_prompt", [32, 33])
def test_w9_a_full_load_without_a_token_leaves_one_to_compute(rig: Rig, num_prompt: int) -> None:
    r = rig.add(num_prompt, request_id="r", answer=(num_prompt, True))
    rig.step()
    assert r.num_computed_tokens == num_prompt
    rig.finish_load("r")
    rig.step()
    assert r.num_computed_tokens == num_prompt - 1
    assert rig.step() == {"r": 1}
    assert rig.scheduler.counters.prompt_tokens_computed == 1
    run_to_the_end(rig)
    rig.assert_undisturbed(r)


@pytest.mark.parametrize("num_prompt", [31, 32, 33])
def test_a_full_load_with_its_first_token_computes_no_prompt_token(rig: Rig, num_prompt: int) -> None:
    r = rig.add(num_prompt, request_id="r", answer=(num_prompt, True))
    rig.step()
    rig.finish_load("r", first_token=True, num_remote_cached_tokens=16)
    assert rig.step() == {}
    assert len(token_ids_of(rig.outputs, "r")) == 1  # handed out before anything ran here
    assert rig.step() == {"r": 1}
    assert rig.worker.batches[-1].requests[0].output_position == 1
    run_to_the_end(rig)
    rig.assert_undisturbed(r)
    assert rig.scheduler.counters.prompt_tokens_computed == 0
    assert rig.final(r).num_cached_tokens == 16


@pytest.mark.parametrize(
    ("token", "sampling", "state", "stop_reason"),
    [
        (EOS, {"ignore_eos": False}, S.FINISHED_STOPPED, None),
        (9, {"stop_token_ids": (9,)}, S.FINISHED_STOPPED, 9),
        (7, {"max_tokens": 1}, S.FINISHED_LENGTH, None),
    ],
)
def test_the_first_token_may_end_the_request(rig: Rig, token, sampling, state, stop_reason) -> None:
    r = rig.add(33, request_id="r", answer=(33, True), **sampling)
    rig.step()
    rig.connector.finish_load("r", token)
    rig.step()
    assert (rig.final(r).finish_state, rig.final(r).stop_reason) == (state, stop_reason)
    assert token_ids_of(rig.outputs, "r") == [token]
    assert rig.scheduler.is_idle()


@with_settings(block_size=4, num_blocks=16)
@pytest.mark.parametrize("num_local", range(0, 13, 4))
@pytest.mark.parametrize("num_prompt", range(13, 18))
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("first_token", [True, False])
def test_every_length_with_every_local_hit(
    rig: Rig, num_prompt: int, num_local: int, is_async: bool, first_token: bool
) -> None:
    prompt = list(range(num_prompt))
    if num_local:
        rig.add(prompt=prompt[:num_local], max_tokens=1)
        rig.step()
    r = rig.add(prompt=prompt, request_id="r", answer=(num_prompt - num_local, is_async))
    rig.step()
    assert rig.connector.asked[-1] == ("r", num_local)
    if is_async:
        rig.finish_load("r", first_token=first_token)
    run_to_the_end(rig)
    rig.assert_undisturbed(r)


def test_a_sync_load_runs_in_the_same_step_and_leaves_a_token(rig: Rig) -> None:
    r = rig.add(33, request_id="r", answer=(33, False))
    assert rig.step() == {"r": 1}
    assert rig.connector.loads == {}
    assert rig.worker.batches[-1].requests[0].num_computed_tokens == 32
    run_to_the_end(rig)
    rig.assert_undisturbed(r)


@with_settings(max_num_batched_tokens=16)
def test_a_partial_load_is_completed_in_chunks(rig: Rig) -> None:
    r = rig.add(60, request_id="r", answer=(20, True))
    rig.step()
    rig.finish_load("r")
    rig.step()
    assert [rig.step()["r"] for _ in range(4)] == [16, 16, 8, 1]
    run_to_the_end(rig)
    rig.assert_undisturbed(r)


@with_settings(max_num_batched_tokens=16)
def test_a_load_needs_no_budget(rig: Rig) -> None:
    rig.add(200, request_id="long")
    rig.step()
    r = rig.add(33, request_id="r", answer=(33, True))
    assert rig.step() == {"long": 16}
    assert r.state is S.WAITING_FOR_REMOTE_KVS
    rig.finish_load("r")


def test_loading_blocks_are_invisible_until_confirmed(rig: Rig) -> None:
    rig.add(prompt=range(64), request_id="a", answer=(64, True))
    rig.step()
    rig.add(prompt=range(64), request_id="b", max_tokens=1)
    assert rig.step() == {"b": 64}
    rig.finish_load("a")
    rig.scheduler.pool.reset_prefix_cache()
    rig.step()
    rig.add(prompt=range(64), request_id="c", max_tokens=1)
    assert rig.step() == {"a": 1, "c": 16}


@with_settings(max_num_seqs=2, max_num_batched_tokens=64)
def test_loading_requests_take_seats_so_that_they_can_run_when_loaded(rig: Rig) -> None:
    for name in "abc":
        rig.add(33, request_id=name, answer=(33, True))
    rig.step()
    assert (rig.scheduler.num_loading, rig.scheduler.num_waiting) == (2, 1)
    for name in "ba":
        rig.finish_load(name)
    rig.step()
    assert list(rig.step()) == ["b", "a"]  # in the order they came in; c has no seat
    rig.connector.answers.clear()


@with_settings(num_blocks=4, block_size=4, watermark_blocks=1)
def test_holders_of_blocks_come_before_those_that_own_none(rig: Rig) -> None:
    rig.add(8, request_id="loading", answer=(8, True))
    rig.step()
    rig.add(5, request_id="other", max_tokens=1)
    rig.add(5, request_id="late", max_tokens=1)
    assert rig.step() == {"other": 5}
    rig.finish_load("loading", first_token=True)
    rig.step()
    assert next(iter(rig.step())) == "loading"


# Preemption


@with_settings(num_blocks=6, block_size=4)
def test_w13_a_preempted_request_asks_nobody_again(rig: Rig) -> None:
    a = rig.add(11, request_id="a", max_tokens=9)
    b = rig.add(8, request_id="b", answer=(8, True), max_tokens=9)
    rig.step()
    rig.finish_load("b", first_token=True, num_remote_cached_tokens=4)
    while b.state is not S.PREEMPTED:
        rig.step()
    num_asked = len(rig.connector.asked)
    run_to_the_end(rig)
    assert len(rig.connector.asked) == num_asked
    rig.assert_undisturbed(a, b)
    assert rig.final(b).num_cached_tokens == 4
    assert [(name, n) for name, _, n in rig.connector.allocated] == [("a", 0), ("b", 8), ("b", 0)]


@with_settings(num_blocks=4, block_size=4)
def test_a_request_with_a_pin_is_not_preempted(rig: Rig) -> None:
    a = rig.add(7, request_id="a", max_tokens=6)
    ship = rig.add(8, request_id="ship", kv_transfer="ship", max_tokens=1)
    rig.step()
    assert rig.final(ship).finish_state is S.FINISHED_LENGTH
    rig.step()
    rig.step()
    assert a.state is S.PREEMPTED  # itself: what the ship holds is out of reach
    assert rig.scheduler.has_work()
    rig.step()
    assert a.state is S.PREEMPTED
    assert not rig.scheduler.has_work()
    rig.connector.finish_ship("ship")
    rig.step()
    assert rig.scheduler.has_work()
    run_to_the_end(rig)
    rig.assert_undisturbed(a)


@with_settings(num_blocks=4, block_size=4)
def test_a_pinned_request_waits_rather_than_undo_what_is_scheduled(rig: Rig) -> None:
    a = rig.add(6, request_id="a", max_tokens=6)
    ship = rig.add(7, request_id="ship", kv_transfer="ship", max_tokens=6)
    rig.step()
    assert rig.step() == {"a": 1, "ship": 1}
    assert rig.step() == {"a": 1}  # the ship needs a block: a's are taken, its own are pinned
    assert (a.state, ship.state) == (S.RUNNING, S.RUNNING)
    rig.connector.finish_ship("ship")
    run_to_the_end(rig)
    rig.assert_undisturbed(a, ship)
    assert [name for name, *_ in rig.connector.allocated].count("ship") <= 2


@with_settings(num_blocks=4, block_size=4)
def test_a_shipped_request_that_is_preempted_ships_once(rig: Rig) -> None:
    a = rig.add(7, request_id="a", max_tokens=6)
    ship = rig.add(7, request_id="ship", kv_transfer="ship", max_tokens=6)
    rig.step()
    rig.connector.finish_ship("ship")
    while ship.num_preemptions == 0:
        rig.step()
    while ship.state is not S.RUNNING:
        rig.step()
    assert rig.scheduler.num_open_transfers == 0
    run_to_the_end(rig)
    rig.assert_undisturbed(a, ship)


@with_settings(num_blocks=4, block_size=4)
def test_pins_that_nobody_will_end_cannot_block_for_ever(rig: Rig) -> None:
    rig.connector.ships_kv = lambda request: True
    rig.connector.has_open_transfers = lambda: False
    requests = [rig.add(7, request_id=name, max_tokens=9) for name in "ab"]
    for request in requests:
        rig.connector.ships.pop(request.request_id, None)
    for _ in range(4):
        rig.step()
        rig.connector.ships.clear()
    assert rig.final(requests[1]).error == (
        ErrorKind.OVERLOADED,
        "the KV cache is full of blocks that are pinned for transfers",
    )
    run_to_the_end(rig)
    rig.assert_undisturbed(requests[0])


# Shipping


def test_shipped_blocks_stay_pinned_after_the_end(rig: Rig) -> None:
    ship = rig.add(33, request_id="ship", kv_transfer="ship", max_tokens=1)
    rig.step()
    final = rig.final(ship)
    assert (final.finish_state, final.kv_transfer_params) == (S.FINISHED_LENGTH, {"held": "ship"})
    assert (rig.scheduler.pool.num_held, rig.scheduler.pool.num_pinned) == (0, 3)
    assert not rig.scheduler.is_idle()
    assert rig.step() == {}
    rig.connector.finish_ship("ship")
    rig.step()
    assert rig.scheduler.is_idle()


def test_blocks_held_only_at_the_end_are_pinned_then(rig: Rig) -> None:
    rig.connector.request_finished = lambda request, blocks: (rig.connector.finished.append("r"), (True, None))[1]
    rig.add(33, request_id="r", max_tokens=1)
    rig.step()
    assert rig.scheduler.pool.num_pinned == 3
    rig.connector.close("r")
    rig.step()
    assert rig.scheduler.is_idle()


def test_a_failed_ship_ends_its_request(rig: Rig) -> None:
    rig = Rig(max_num_batched_tokens=16)
    ship = rig.add(60, request_id="ship", kv_transfer="ship", max_tokens=1)
    rig.step()
    rig.connector.fail("ship", "the decode node went away")
    rig.step()
    assert rig.final(ship).error == (ErrorKind.KV_LOAD_FAILED, "the decode node went away")
    assert rig.scheduler.is_idle()


def test_a_node_may_load_from_a_tier_and_ship_to_a_peer(rig: Rig) -> None:
    ship = rig.add(33, request_id="r", kv_transfer="ship", answer=(16, True), max_tokens=1)
    rig.step()
    rig.finish_load("r")
    rig.step()
    assert rig.scheduler.pool.num_pinned == 3  # the load is over, the ship is not
    rig.step()
    rig.connector.finish_ship("r")
    run_to_the_end(rig)
    rig.assert_undisturbed(ship)


# Failure


@with_settings(kv_load_failure_policy="fail")
@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_failed_load_ends_in_an_error_and_leaves_no_trace_in_the_index(rig: Rig, is_fenced: bool) -> None:
    r = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    load = rig.connector.loads["r"]
    rig.connector.fail("r", is_fenced=is_fenced)
    rig.step()
    final = rig.final(r)
    assert (final.finish_state, final.error) == (S.FINISHED_ERROR, (ErrorKind.KV_LOAD_FAILED, "peer lost"))
    assert (rig.scheduler.pool.num_cached, rig.scheduler.pool.num_pinned) == (0, 0 if is_fenced else 3)
    if not is_fenced:
        other = rig.add(33)
        rig.step()
        rig.worker.poison(load)  # the silent writer wakes up
        for _ in range(5):
            rig.step()
        rig.assert_undisturbed(other)
        rig.connector.close("r")
        rig.step()
    assert rig.scheduler.is_idle()


@with_settings(kv_load_failure_policy="fail")
def test_a_failed_sync_load_discards_the_token_and_spares_the_rest_of_the_batch(rig: Rig) -> None:
    rig.worker.failing_loads.add("bad")
    bad = rig.add(33, request_id="bad", answer=(32, False))
    good = rig.add(33, request_id="good", answer=(32, False))
    rig.step()
    assert (rig.final(bad).finish_state, rig.final(bad).new_tokens) == (S.FINISHED_ERROR, ())
    run_to_the_end(rig)
    rig.assert_undisturbed(good)
    assert rig.scheduler.counters.num_late_connector_ids == 0


@with_settings(kv_load_failure_policy="fail")
def test_kv_on_top_of_an_unconfirmed_sync_load_is_not_found(rig: Rig) -> None:
    rig.worker._finish_sync_loads = lambda: None  # the report is late
    rig.add(prompt=range(64), request_id="r", answer=(32, False), max_tokens=9)
    rig.worker.fill(StubTransfer(make_request(prompt=range(64)), range(3), 0, 32))
    rig.step()
    rig.step()
    assert rig.scheduler.pool.num_cached == 0
    rig.connector.fail("r")
    rig.step()
    assert rig.scheduler.pool.num_cached == 0
    rig.add(prompt=range(64), request_id="other", answer=(32, False), max_tokens=9)
    rig.step()
    rig.connector.finish_load("other")
    rig.step()
    assert rig.scheduler.pool.num_cached == 4


@with_settings(kv_load_failure_policy="fail")
@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_unfenced_failure_keeps_the_pin_whatever_else_is_said(rig: Rig, is_aborted: bool) -> None:
    rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    if is_aborted:
        rig.engine.abort_request("r")
    else:
        rig.connector.request_finished = lambda request, _: (rig.connector.finished.append("r"), (False, None))[1]
    rig.connector.fail("r", is_fenced=False)
    rig.step()
    rig.step()
    assert rig.scheduler.pool.num_pinned == 3
    rig.connector.close("r")
    rig.step()
    assert rig.scheduler.is_idle()


@pytest.mark.parametrize(("num_remote", "num_cached"), [(0, 16), (32, 32)])
def test_cached_tokens_are_those_found_at_either_end(rig: Rig, num_remote: int, num_cached: int) -> None:
    rig.add(prompt=range(16), max_tokens=1)
    rig.step()
    r = rig.add(prompt=range(40), request_id="r", answer=(24, True))
    rig.step()
    rig.finish_load("r", first_token=True, num_remote_cached_tokens=num_remote)
    run_to_the_end(rig)
    assert rig.final(r).num_cached_tokens == num_cached


# Aborts


@pytest.mark.parametrize("report", ["close", "finish_load", "fail"])
def test_w15_an_abort_during_a_load_waits_for_the_transfer(rig: Rig, report: str) -> None:
    r = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    load = rig.connector.loads["r"]
    rig.engine.abort_request("r")
    rig.step()
    assert rig.final(r).finish_state is S.FINISHED_ABORTED
    assert (rig.scheduler.pool.num_free, rig.scheduler.pool.num_pinned) == (61, 3)
    with pytest.raises(RequestError, match="in use"):
        rig.engine.add_request(make_request(request_id="r"))
    others = [rig.add(33 + i) for i in range(3)]
    rig.step()
    rig.worker.poison(load)  # written long after the abort: nobody else may own these blocks
    for _ in range(5):
        rig.step()
    rig.assert_undisturbed(*others)
    getattr(rig.connector, report)("r")
    rig.step()
    assert rig.scheduler.is_idle()
    assert rig.scheduler.counters.num_late_connector_ids == 0


@pytest.mark.parametrize("when", ["before", "loaded", "running"])
def test_w15_an_abort_before_or_after_a_load(rig: Rig, when: str) -> None:
    r = rig.add(33, request_id="r", answer=(33, True))
    if when != "before":
        rig.step()
        rig.finish_load("r", first_token=True)
        rig.step()
    if when == "running":
        rig.step()
    assert r.state is {"before": S.WAITING, "loaded": S.WAITING, "running": S.RUNNING}[when]
    rig.engine.abort_request("r")
    rig.step()
    assert rig.final(r).finish_state is S.FINISHED_ABORTED
    assert rig.scheduler.is_idle()


def test_an_aborted_load_that_is_not_held_frees_at_once(rig: Rig) -> None:
    rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.connector.loads.clear()
    rig.engine.abort_request("r")
    assert rig.scheduler.pool.num_free == 64
    rig.connector.finish_load("r", 7)
    rig.step()
    assert rig.scheduler.counters.num_late_connector_ids == 1


# Late, repeated and unknown reports


def test_reports_about_nobody_are_counted_and_dropped(rig: Rig) -> None:
    rig.connector.finish_load("unknown", 7)
    rig.connector.fail("stranger")
    rig.connector.close("nobody")
    r = rig.add(33, request_id="r")
    rig.step()
    assert rig.scheduler.counters.num_late_connector_ids == 3
    run_to_the_end(rig)
    rig.assert_undisturbed(r)


def test_repeated_reports_do_no_harm(rig: Rig) -> None:
    r = rig.add(33, request_id="r", answer=(33, True))
    ship = rig.add(33, request_id="ship", kv_transfer="ship", max_tokens=1)
    rig.step()
    rig.finish_load("r", first_token=True)
    rig.step()
    rig.connector.finish_load("r", 7)
    rig.connector.finish_load("ship", 7)  # not a load: its pin stays
    rig.step()
    assert token_ids_of(rig.outputs, "r") == undisturbed_output(r, 1000)[:2]
    assert rig.scheduler.pool.num_pinned == 3
    rig.connector.fail("r")
    rig.connector.finish_ship("ship")
    rig.step()
    rig.connector.finish_ship("ship")
    run_to_the_end(rig)
    rig.step()
    rig.assert_undisturbed(r, ship)
    assert rig.scheduler.counters.num_late_connector_ids == 4


def test_a_sent_report_does_not_end_a_live_load(rig: Rig) -> None:
    r = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.connector._sent.add("r")
    rig.step()
    assert (r.state, rig.scheduler.pool.num_pinned) == (S.WAITING_FOR_REMOTE_KVS, 3)
    rig.finish_load("r")
    run_to_the_end(rig)
    rig.assert_undisturbed(r)
