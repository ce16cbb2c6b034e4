"""Priority: who is admitted first, who is preempted first; and the line they wait in."""

import pytest

from engine.engine import Engine
from engine.request import RequestState
from engine.request_queue import RequestQueue
from tests.builders import ScriptedWorker, make_request, make_scheduler, run_until_idle


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def make_engine(**settings) -> Engine:
    return Engine(make_scheduler(**settings), ScriptedWorker())


def add(engine: Engine, request_id: str, priority: int, num_tokens: int = 8, **sampling):
    request = make_request(num_tokens, request_id=request_id, priority=priority, **sampling)
    engine.add_request(request)
    return request


def test_lower_first_and_within_one_first_come_first_served():
    queue = RequestQueue()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        queue.push_back(make_request(request_id=name, priority=priority))
    assert names(queue) == ["c", "e", "a", "d", "b"]
    queue.discard("e")
    queue.discard("never there")
    back = [make_request(request_id=name, priority=priority) for name, priority in (("x", 0), ("y", 5), ("z", 0))]
    queue.push_front(back)
    assert (len(queue), names(queue)) == (7, ["c", "x", "z", "a", "d", "y", "b"])
    assert [queue.pop_front().request_id for _ in range(7)] == ["c", "x", "z", "a", "d", "y", "b"]
    assert len(queue) == 0


def test_a_seat_goes_to_the_lowest():
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("late", 3), ("soon", -3), ("usual", 0), ("usual too", 0)):
        add(engine, name, priority, max_tokens=1)
    order = [output.request_id for output in run_until_idle(engine)]
    assert order == ["soon", "usual", "usual too", "late"]


def test_the_head_of_the_line_is_not_overtaken_for_want_of_blocks():
    engine = make_engine(num_blocks=5)
    running = add(engine, "running", 9, 60)
    engine.step()
    add(engine, "small", 1, 5)
    add(engine, "big", 0, 60)
    engine.step()
    assert (running.state, names(engine.scheduler._roster.waiting)) == (RequestState.RUNNING, ["big", "small"])
    engine.abort_all()
    run_until_idle(engine)


@pytest.mark.parametrize(
    ("priorities", "victim"), [((0, 0, 0), "c"), ((1, 0, 0), "a"), ((0, 2, 1), "b"), ((-1, -1, -2), "b")]
)
def test_the_worst_priority_is_preempted_and_of_these_the_last(priorities: tuple[int, ...], victim: str):
    engine = make_engine(num_blocks=6, block_size=4)
    requests = [add(engine, name, priority, max_tokens=4) for name, priority in zip("abc", priorities, strict=True)]
    engine.step()
    engine.step()
    assert [r.request_id for r in requests if r.state is RequestState.PREEMPTED] == [victim]
    assert engine.scheduler.counters.num_preemptions == 1
    run_until_idle(engine)
    assert [r.num_output_tokens for r in requests] == [4, 4, 4]


def test_a_preempted_request_waits_behind_better_priorities():
    engine = make_engine(num_blocks=4, block_size=4)
    add(engine, "a", 0, max_tokens=6)
    worse = add(engine, "worse", 1, max_tokens=8)
    engine.step()
    add(engine, "new", 0, 4)
    add(engine, "newer", 1, 4)
    engine.step()
    assert worse.state is RequestState.PREEMPTED
    assert names(engine.scheduler._roster.waiting) == ["new", "worse", "newer"]
    run_until_idle(engine)
