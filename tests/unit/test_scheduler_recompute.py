"""Loads that fail under the policy "recompute", and requests that run before their load is over."""

import pytest

from engine.request import RequestState
from tests.builders import undisturbed_output
from tests.unit.test_scheduler_transfers import Rig, rig, run_to_the_end, with_settings

S = RequestState
__all__ = ["rig"]


def fill_until(rig: Rig, request_id: str, end: int) -> None:
    """The load's KV arrives up to position `end`; the rest is poison."""
    load = rig.connector.loads[request_id]
    rig.worker.poison(load)
    rig.worker.write(load.block_ids, load.start, load.request.prompt_token_ids[load.start : end])


@pytest.mark.parametrize("num_valid", [None, 0, 16, 20, 32, 33])
def test_only_what_did_not_arrive_is_computed_here(rig: Rig, num_valid: int | None) -> None:
    request = rig.add(33, request_id="r", answer=(33, True))
    other = rig.add(20, request_id="other")
    rig.step()
    fill_until(rig, "r", num_valid or 0)
    rig.connector.fail("r", num_valid_tokens=num_valid)
    rig.step()
    computed = rig.step()["r"]
    assert computed == max(1, 33 - (num_valid or 0))
    run_to_the_end(rig)
    rig.assert_undisturbed(request, other)
    assert rig.scheduler.counters.num_loads_recomputed == 1
    assert rig.scheduler.counters.recomputed_tokens == 33 - (num_valid or 0)


def test_a_local_hit_is_kept_when_the_rest_fails(rig: Rig) -> None:
    first = rig.add(prompt=range(64), request_id="first")
    run_to_the_end(rig)
    request = rig.add(prompt=range(64), request_id="r", answer=(16, True))
    rig.step()
    assert rig.connector.loads["r"].start == 48
    rig.connector.fail("r")
    rig.step()
    assert rig.step() == {"r": 16}
    run_to_the_end(rig)
    rig.assert_undisturbed(first, request)


def test_after_a_failure_it_never_asks_again_even_when_preempted(rig: Rig) -> None:
    rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.connector.fail("r")
    asked = len(rig.connector.asked)
    run_to_the_end(rig)
    assert len(rig.connector.asked) == asked


def test_a_silent_writer_gets_the_old_blocks_and_the_request_new_ones(rig: Rig) -> None:
    request = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    load = rig.connector.loads["r"]
    rig.connector.fail("r", is_fenced=False)
    rig.step()
    rig.step()
    assert not set(request.block_ids) & set(load.block_ids)
    rig.worker.poison(load)  # the silent writer wakes up
    run_until_only_the_pin_is_left(rig)
    rig.assert_undisturbed(request)
    assert rig.scheduler.pool.num_pinned == 3, "pinned until the writer is known to be gone, request or no request"
    rig.connector.close("r")
    rig.step()
    assert rig.scheduler.pool.num_pinned == 0


def run_until_only_the_pin_is_left(rig: Rig) -> None:
    for _ in range(20):
        rig.step()


def test_a_failed_sync_load_discards_that_step_s_token_and_goes_on(rig: Rig) -> None:
    rig.worker.failing_loads.add("bad")
    bad = rig.add(33, request_id="bad", answer=(32, False))
    good = rig.add(33, request_id="good", answer=(32, False))
    rig.step()
    assert bad.output == []
    assert len(good.output) == 1
    run_to_the_end(rig)
    rig.assert_undisturbed(bad, good)


def test_a_final_failure_ends_the_request_whatever_the_policy(rig: Rig) -> None:
    request = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.connector.fail("r", is_final=True)
    rig.step()
    assert rig.final(request).finish_state is S.FINISHED_ERROR


def first_token_of(rig: Rig, request) -> int:
    return undisturbed_output(request, 1000)[0]


def test_an_early_request_runs_while_its_load_is_open_and_stays_pinned(rig: Rig) -> None:
    request = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.worker.fill(rig.connector.loads["r"])
    rig.connector.admit_early("r", first_token_of(rig, request))
    rig.step()
    assert len(request.output) == 1
    assert rig.step() == {"r": 1}
    assert (rig.scheduler.num_open_transfers, rig.scheduler.pool.num_pinned) == (1, 3)
    assert rig.scheduler.pool.num_cached == 0, "not confirmed yet"
    rig.connector.finish_load("r")
    rig.step()
    assert (rig.scheduler.num_open_transfers, rig.scheduler.pool.num_pinned) == (0, 0)
    assert rig.scheduler.pool.num_cached == 2
    run_to_the_end(rig)
    rig.assert_undisturbed(request)
    assert rig.scheduler.counters.num_early_admissions == 1


def test_an_early_request_whose_load_fails_at_the_barrier_recomputes_and_repeats_no_token(rig: Rig) -> None:
    request = rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    fill_until(rig, "r", 20)
    rig.connector.admit_early("r", first_token_of(rig, request))
    rig.step()
    rig.connector.fail("r", num_valid_tokens=20)
    rig.step()
    assert len(request.output) == 1, "the token of the failed step does not count"
    assert rig.step()["r"] == 14
    run_to_the_end(rig)
    rig.assert_undisturbed(request)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_an_early_request_may_end_before_its_load(rig: Rig, max_tokens: int) -> None:
    request = rig.add(33, request_id="r", answer=(33, True), max_tokens=max_tokens)
    rig.step()
    rig.worker.fill(rig.connector.loads["r"])
    rig.connector.admit_early("r", first_token_of(rig, request))
    for _ in range(3):
        rig.step()
    rig.assert_undisturbed(request)
    assert rig.scheduler.pool.num_pinned == 3, "the writer may still be at it"
    rig.connector.close("r")
    rig.step()
    used = 33 if max_tokens == 2 else 0
    assert rig.scheduler.counters.prompt_tokens_loaded == used, "a forward ran on it, or only its first token came"


def test_early_news_of_a_request_that_is_gone_are_counted(rig: Rig) -> None:
    rig.add(33, request_id="r", answer=(33, True))
    rig.step()
    rig.engine.abort_request("r")
    rig.connector.admit_early("r", 5)
    rig.step()
    assert rig.scheduler.counters.num_late_connector_ids == 1
    rig.connector.close("r")
    rig.step()


@with_settings(num_blocks=8, watermark_blocks=0)
def test_recomputing_under_pressure_changes_no_token(rig: Rig) -> None:
    requests = [rig.add(20 + i, request_id=f"r{i}", answer=(20 + i, True), max_tokens=20) for i in range(3)]
    for _ in range(60):
        rig.step()
        for request_id in list(rig.connector.loads):
            fill_until(rig, request_id, 16)
            rig.connector.fail(request_id, num_valid_tokens=16)
    run_to_the_end(rig)
    rig.assert_undisturbed(*requests)
