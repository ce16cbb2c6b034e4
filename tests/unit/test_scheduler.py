"""The scheduler without a connector: budget, blocks, chunks, preemption, prefix caching, ends."""

from collections.abc import Iterator

import pytest

from engine.batch import Batch, BatchResult
from engine.engine import Engine
from engine.errors import ErrorKind, RequestError
from engine.request import RequestState
from engine.scheduler import Scheduler
from tests.builders import (
    EOS,
    FakeClock,
    PagedWorker,
    ScriptedWorker,
    final_of,
    make_request,
    make_scheduler,
    run_until_idle,
    token_ids_of,
    undisturbed_output,
)

S = RequestState


class Rig:
    """A scheduler with a scripted worker. Left with nothing in it."""

    def __init__(self, **settings) -> None:
        self.scheduler = make_scheduler(**settings)
        self.worker = ScriptedWorker()
        self.engine = Engine(self.scheduler, self.worker)

    def add(self, num_tokens: int = 33, **fields):
        request = make_request(num_tokens, **fields)
        self.engine.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Tokens computed in this step, by request id."""
        self.engine.step()
        return shares(self.worker.batches[-1])


def shares(batch: Batch) -> dict[str, int]:
    return {request.request_id: len(request.token_ids) for request in batch.requests}


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """`@pytest.mark.parametrize("rig", [{...}], indirect=True)` to set it up differently."""
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    for request_id in list(rig.scheduler._roster.requests):
        rig.engine.abort_request(request_id)
    run_until_idle(rig.engine)
    assert_empty(rig.scheduler)


def assert_empty(scheduler: Scheduler) -> None:
    assert scheduler.is_idle()
    assert not scheduler.has_work()
    scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_loading) == (0, 0, 0)
    assert (scheduler.num_open_transfers, scheduler.pool.num_held, scheduler.pool.num_pinned) == (0, 0, 0)


def with_settings(**settings):
    return pytest.mark.parametrize("rig", [settings], indirect=True)


# Adding


def test_a_request_runs_to_its_end(rig: Rig) -> None:
    request = rig.add(33, request_id="r", max_tokens=3)
    rig.worker.script("r", [5, 6, 8])
    outputs = run_until_idle(rig.engine)
    assert token_ids_of(outputs, "r") == [5, 6, 8]
    final = final_of(outputs, "r")
    assert (final.finish_state, final.num_prompt_tokens, final.num_cached_tokens) == (S.FINISHED_LENGTH, 33, 0)
    assert [state for state, _ in request.history] == [S.WAITING, S.RUNNING, S.FINISHED_LENGTH]


@with_settings(max_model_len=40)
def test_what_can_never_be_served_is_refused_by_name(rig: Rig) -> None:
    rig.add(5, request_id="r")
    for request, param in [
        (make_request(5, request_id="r"), "request_id"),
        (make_request(0), "prompt"),
        (make_request(40), "prompt"),
    ]:
        with pytest.raises(RequestError) as caught:
            rig.scheduler.add_request(request)
        assert caught.value.param == param
    rig.add(39)


@with_settings(vocab_size=300)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 300]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [5], "logit_bias": {300: 1.0}}, "logit_bias"),
        ({"prompt": [5], "stop_token_ids": (300,)}, "stop_token_ids"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused_by_name(rig: Rig, fields, param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        rig.add(**fields)
    assert refusal.value.param == param
    rig.add(prompt=[5, 299])


@with_settings(num_blocks=2, max_model_len=1000)
def test_a_prompt_that_the_pool_cannot_hold_is_refused(rig: Rig) -> None:
    with pytest.raises(RequestError, match="at most 32 fit"):
        rig.scheduler.add_request(make_request(32))
    rig.add(31)


@with_settings(max_model_len=40)
def test_the_model_s_length_ends_a_request(rig: Rig) -> None:
    rig.add(37, request_id="r", max_tokens=100)
    outputs = run_until_idle(rig.engine)
    assert len(token_ids_of(outputs, "r")) == 3
    assert final_of(outputs, "r").finish_state is S.FINISHED_LENGTH


@with_settings(num_blocks=2, block_size=4, max_model_len=1000)
def test_the_pool_s_size_ends_a_lone_request(rig: Rig) -> None:
    rig.add(5, request_id="r", max_tokens=100)
    outputs = run_until_idle(rig.engine)
    assert len(token_ids_of(outputs, "r")) == 3
    assert final_of(outputs, "r").finish_state is S.FINISHED_LENGTH
    assert rig.scheduler.counters.num_preemptions == 0


# Budget and chunks


@with_settings(max_num_batched_tokens=50, max_num_seqs=4)
def test_the_budget_is_shared_in_order_and_never_exceeded(rig: Rig) -> None:
    a, b, c = (rig.add(33, request_id=name).request_id for name in "abc")
    assert rig.step() == {a: 33, b: 17}
    assert rig.step() == {a: 1, b: 16, c: 33}
    assert rig.step() == {a: 1, b: 1, c: 1}


@with_settings(max_num_batched_tokens=50, long_prefill_token_threshold=20)
def test_a_long_prompt_is_computed_in_chunks_that_leave_room_for_others(rig: Rig) -> None:
    rig.add(45, request_id="long")
    rig.add(5, request_id="short")
    assert rig.step() == {"long": 20, "short": 5}
    assert rig.step() == {"short": 1, "long": 20}
    assert rig.step() == {"short": 1, "long": 5}


@with_settings(max_num_batched_tokens=8, max_num_seqs=4, long_prefill_token_threshold=0)
def test_decoding_requests_never_miss_a_step(rig: Rig) -> None:
    rig.add(100, request_id="long")
    rig.step()
    for name in "ab":
        rig.add(4, request_id=name)
    assert rig.step() == {"long": 8}  # first come first served
    while "a" not in rig.step():
        pass
    rig.add(100, request_id="longer")
    for _ in range(5):
        assert rig.step()["a"] == 1


def test_nothing_is_sampled_before_the_last_prompt_token(rig: Rig) -> None:
    rig = Rig(max_num_batched_tokens=20)
    rig.add(45, max_tokens=2)
    for expected in [False, False, True, True]:
        rig.step()
        assert [request.sampling is not None for request in rig.worker.batches[-1].requests] == [expected]
    positions = [(r.num_computed_tokens, r.output_position) for b in rig.worker.batches for r in b.requests]
    assert positions == [(0, 0), (20, 0), (40, 0), (45, 1)]


@with_settings(max_num_seqs=2, max_num_batched_tokens=256)
def test_no_more_run_than_there_are_seats(rig: Rig) -> None:
    for name in "abc":
        rig.add(5, request_id=name, max_tokens=2)
    assert rig.step().keys() == {"a", "b"}
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
    assert rig.step().keys() == {"a", "b"}
    assert rig.step().keys() == {"c"}


def test_blocks_cover_what_is_scheduled_from_admission_on(rig: Rig) -> None:
    rig = Rig(max_num_batched_tokens=20)
    rig.add(45, max_tokens=6)
    for num_blocks in [3, 3, 3, 3, 3, 3, 4]:  # 45 prompt tokens in 3 blocks; the 49th needs a fourth
        rig.step()
        assert len(rig.worker.batches[-1].requests[0].block_ids) == num_blocks


def test_what_the_sampler_needs_travels_with_the_share(rig: Rig) -> None:
    rig.add(
        3, request_id="r", prompt=[4, 5, 6], repetition_penalty=1.2, min_tokens=1, stop_token_ids=(9,), max_tokens=3
    )
    rig.worker.script("r", [7])
    rig.step()
    rig.step()
    first, second = (batch.requests[0] for batch in rig.worker.batches)
    assert (first.banned_token_ids, second.banned_token_ids) == ([EOS, 9], ())
    assert (second.prompt_token_ids, second.output_token_ids, second.output_position) == ((4, 5, 6), (7,), 1)
    plain = rig.add(3, ignore_eos=True, min_tokens=1, stop_token_ids=(9,))
    rig.step()
    share = next(r for r in rig.worker.batches[-1].requests if r.request_id == plain.request_id)
    assert (share.banned_token_ids, share.prompt_token_ids, share.output_token_ids) == ([9], (), ())


# Blocks


@with_settings(num_blocks=5)
def test_lack_of_blocks_ends_the_pass(rig: Rig) -> None:
    rig.add(60, request_id="a")
    rig.add(60, request_id="big")
    rig.add(5, request_id="small")
    assert rig.step().keys() == {"a"}  # "small" would fit, but does not overtake
    assert [request.request_id for request in rig.scheduler._roster.waiting] == ["big", "small"]


@with_settings(num_blocks=6, watermark_blocks=2)
def test_the_watermark_is_kept_while_something_runs(rig: Rig) -> None:
    rig.add(33, request_id="a", max_tokens=2)
    rig.add(33, request_id="b")
    assert rig.step().keys() == {"a"}
    rig.step()
    assert rig.step().keys() == {"b"}


@with_settings(num_blocks=3, watermark_blocks=2)
def test_the_watermark_does_not_lock_out_a_lone_request(rig: Rig) -> None:
    rig.add(40, request_id="a")
    assert rig.step().keys() == {"a"}


@with_settings(num_blocks=4, block_size=4)
def test_the_last_admitted_is_preempted_and_goes_to_the_front(rig: Rig) -> None:
    a = rig.add(8, request_id="a", max_tokens=4)
    b = rig.add(8, request_id="b", max_tokens=8)
    rig.add(4, request_id="c")
    rig.step()
    assert rig.step() == {"a": 1}
    assert (b.state, b.num_computed_tokens, b.block_ids, b.num_preemptions) == (S.PREEMPTED, 0, [], 1)
    assert [request.request_id for request in rig.scheduler._roster.waiting] == ["b", "c"]
    assert rig.scheduler.counters.num_preemptions == 1
    rig.scheduler.check()
    while not a.is_finished:
        rig.step()
    assert rig.step()["b"] == 5  # 8 prompt tokens and one generated, of which one block was still cached
    assert b.state is S.RUNNING


@with_settings(num_blocks=4, block_size=4)
def test_a_request_may_have_to_preempt_itself(rig: Rig) -> None:
    rig.add(11, request_id="a", max_tokens=2)
    b = rig.add(4, request_id="b", max_tokens=8)
    rig.step()
    assert rig.step() == {"a": 1}
    assert b.state is S.PREEMPTED
    outputs = run_until_idle(rig.engine)
    assert len(b.output) == 8
    assert final_of(outputs, "b").finish_state is S.FINISHED_LENGTH


def test_w13_a_preempted_request_resumes_with_all_its_tokens() -> None:
    """Prompt 20 + 7 generated, preempted: 27 tokens are computed again, the output is that of an undisturbed run."""
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False, max_num_seqs=2)
    worker = PagedWorker(4, 16)
    engine = Engine(scheduler, worker)
    first = make_request(26, request_id="first", max_tokens=20, ignore_eos=True)
    second = make_request(20, request_id="second", max_tokens=20, ignore_eos=True)
    engine.add_request(first)
    engine.add_request(second)
    outputs = []
    while second.state is not S.PREEMPTED:
        outputs += engine.step()
    assert (second.num_prompt_tokens, second.num_output_tokens) == (20, 7)
    while second.state is not S.RUNNING:
        outputs += engine.step()
    assert shares(worker.batches[-1])["second"] == 27
    outputs += run_until_idle(engine)
    for request in (first, second):
        assert token_ids_of(outputs, request.request_id) == undisturbed_output(request, 1000)
    assert_empty(scheduler)


# Prefix caching


def test_full_blocks_are_found_by_the_next_request(rig: Rig) -> None:
    rig.add(prompt=range(40), request_id="a", max_tokens=1)
    rig.step()
    b = rig.add(prompt=range(40), request_id="b", max_tokens=1)
    assert rig.step() == {"b": 8}
    assert b.num_cached_tokens == 32
    counters = rig.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.prompt_tokens_computed) == (80, 32, 48)


@pytest.mark.parametrize("num_tokens", [32, 33])
def test_one_token_is_always_left_to_compute(num_tokens: int, rig: Rig) -> None:
    rig.add(prompt=range(num_tokens), max_tokens=1)
    rig.step()
    rig.add(prompt=range(num_tokens), request_id="b", max_tokens=1)
    assert rig.step() == {"b": 16 if num_tokens == 32 else 1}


def test_generated_tokens_are_found_too(rig: Rig) -> None:
    rig.add(prompt=range(30), request_id="a", max_tokens=3)
    rig.worker.script("a", [50, 51, 52])
    run_until_idle(rig.engine)
    rig.add(prompt=[*range(30), 50, 51, 52], request_id="b", max_tokens=1)
    assert rig.step() == {"b": 1}


def test_chunks_are_found_while_their_request_still_computes() -> None:
    rig = Rig(max_num_batched_tokens=32)
    rig.add(prompt=range(64), request_id="a")
    rig.step()
    rig.add(prompt=range(64), request_id="b")
    rig.step()
    rig.engine.abort_request("a")
    assert rig.step() == {"b": 16}  # 48 were there: all but the block of the last token


def test_salts_and_models_do_not_share(rig: Rig) -> None:
    rig.add(prompt=range(33), max_tokens=1, cache_salt="one")
    rig.step()
    rig.add(prompt=range(33), request_id="b", max_tokens=1, cache_salt="two")
    assert rig.step() == {"b": 33}
    rig.add(prompt=range(33), request_id="c", max_tokens=1, cache_salt="one")
    assert rig.step() == {"c": 1}


@with_settings(enable_prefix_caching=False)
def test_prefix_caching_can_be_off(rig: Rig) -> None:
    for name in "ab":
        rig.add(prompt=range(33), request_id=name, max_tokens=1)
        assert rig.step() == {name: 33}
    assert rig.scheduler.pool.num_cached == 0


def test_running_requests_share_a_prefix(rig: Rig) -> None:
    a = rig.add(prompt=range(40), request_id="a")
    rig.step()
    b = rig.add(prompt=range(40), request_id="b")
    rig.step()
    assert a.block_ids[:2] == b.block_ids[:2]
    assert a.block_ids[2] != b.block_ids[2]
    rig.engine.abort_request("a")
    rig.step()
    rig.scheduler.check()
    assert rig.scheduler.pool.num_held == 3


# Ends


def test_eos_and_stop_tokens_end_a_request(rig: Rig) -> None:
    rig.add(5, request_id="a")
    rig.add(5, request_id="b", stop_token_ids=(9,))
    rig.worker.script("a", [7, EOS])
    rig.worker.script("b", [9])
    outputs = run_until_idle(rig.engine)
    assert (final_of(outputs, "a").finish_state, final_of(outputs, "a").stop_reason) == (S.FINISHED_STOPPED, None)
    assert (final_of(outputs, "b").finish_state, final_of(outputs, "b").stop_reason) == (S.FINISHED_STOPPED, 9)
    assert token_ids_of(outputs, "b") == [9]


@with_settings(num_blocks=4, block_size=4, max_num_batched_tokens=16)
@pytest.mark.parametrize("state", ["waiting", "grammar", "chunk", "decoding", "preempted"])
def test_abort_in_every_state(rig: Rig, state: str) -> None:
    request = make_request(15 if state == "chunk" else 8, request_id="r")
    if state == "preempted":
        rig.add(8, request_id="older")
    if state == "chunk":
        rig.scheduler._config = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=4)._config
    rig.engine.add_request(request)
    if state == "grammar":
        request.move(S.WAITING_FOR_GRAMMAR, 100.0)
    for _ in range({"waiting": 0, "chunk": 2}.get(state, 2)):
        rig.step()
    if state == "preempted":
        assert request.state is S.PREEMPTED
    rig.engine.abort_request("r")
    rig.engine.abort_request("r")
    final = final_of(rig.engine.step(), "r")
    assert (final.finish_state, final.new_tokens, request.block_ids) == (S.FINISHED_ABORTED, (), [])


def test_an_abort_between_schedule_and_update_discards_the_token(rig: Rig) -> None:
    rig.add(5, request_id="r")
    batch = rig.scheduler.schedule()
    rig.engine.abort_request("r")
    rig.engine.add_request(make_request(5, request_id="r"))  # the same name, another request
    outputs = rig.scheduler.update(batch, rig.worker.execute(batch))
    assert [(output.request_id, output.finish_state) for output in outputs] == [("r", S.FINISHED_ABORTED)]
    assert rig.scheduler.counters.generated_tokens == 0
    assert rig.step() == {"r": 5}


def test_a_request_that_could_not_be_sampled_ends_alone_and_its_kv_is_found_by_nobody(rig: Rig) -> None:
    rig.add(33, request_id="bad")
    rig.add(5, request_id="good")
    batch = rig.scheduler.schedule()
    sampled = {"good": rig.worker.execute(batch).sampled["good"]}
    outputs = rig.scheduler.update(batch, BatchResult(sampled=sampled, unsampled={"bad": "not finite"}))
    final = final_of(outputs, "bad")
    assert (final.finish_state, final.error) == (S.FINISHED_ERROR, (ErrorKind.INTERNAL, "not finite"))
    again = rig.add(33, request_id="again")
    rig.step()
    assert again.num_cached_tokens == 0


def test_moves_carry_the_time_of_the_clock_handed_in() -> None:
    clock = FakeClock()
    rig = Rig(clock=clock)
    request = rig.add(5, max_tokens=1)
    clock.advance(2)
    rig.step()
    assert request.history == [(S.WAITING, 100.0), (S.RUNNING, 102.0), (S.FINISHED_LENGTH, 102.0)]


def test_a_request_put_aside_keeps_its_place(rig: Rig) -> None:
    waiting = [rig.add(5, request_id=name) for name in "abcd"]
    waiting[0].move(S.WAITING_FOR_GRAMMAR, 100.0)
    waiting[2].move(S.WAITING_FOR_STREAMING_REQ, 100.0)
    assert rig.step().keys() == {"b", "d"}
    assert [request.request_id for request in rig.scheduler._roster.waiting] == ["a", "c"]
    rig.step()
    for request in (waiting[0], waiting[2]):
        request.move(S.WAITING, 100.0)
    rig.add(5, request_id="e")
    assert list(rig.step()) == ["b", "d", "a", "c", "e"]


def test_work_and_idleness(rig: Rig) -> None:
    assert rig.scheduler.is_idle()
    assert not rig.scheduler.has_work()
    request = rig.add(5, max_tokens=2)
    assert rig.scheduler.has_work()
    request.move(S.WAITING_FOR_GRAMMAR, 100.0)
    rig.step()
    assert not rig.scheduler.has_work()
    assert not rig.scheduler.is_idle()
    rig.engine.abort_request(request.request_id)
    assert rig.scheduler.has_work()  # its last word is still to be said
    rig.step()
    assert rig.scheduler.is_idle()
