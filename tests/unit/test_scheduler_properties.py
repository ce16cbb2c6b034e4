"""Random lives: add, step, abort, load, fail, ship, report twice, in any order, on pools that are always too small.

The worker's KV of a token is the token itself, and what it samples depends on all that the block table leads to. So an
output equal to that of an undisturbed run proves that each step read the right KV: after preemptions, prefix hits,
loads, and transfers that go on writing into blocks whose request is long gone.
"""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.batch import Batch, BatchResult
from engine.engine import Engine
from engine.errors import RequestError
from engine.outputs import RequestOutput
from engine.request import Request, RequestState
from tests.builders import PagedWorker, StubConnector, StubTransfer, make_request, make_scheduler, undisturbed_output

S = RequestState
BLOCK_SIZE = 4
NORMAL_ENDS = (S.FINISHED_STOPPED, S.FINISHED_LENGTH)

prompts = st.tuples(st.sampled_from((0, 100)), st.integers(1, 20), st.integers(0, 4))
samplings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from(((), (5, 6, 7, 8))),
    }
)


class WatchedWorker(PagedWorker):
    """Has each batch looked at before it runs."""

    def __init__(self, *args, look_at: Callable[[Batch], None]) -> None:
        super().__init__(*args)
        self._look_at = look_at

    def execute(self, batch: Batch) -> BatchResult:
        self._look_at(batch)
        return super().execute(batch)


class Lives(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 16),
        limits=st.fixed_dictionaries(
            {
                "max_num_seqs": st.sampled_from((2, 4, 8)),
                "max_num_batched_tokens": st.sampled_from((8, 16, 64)),
                "long_prefill_token_threshold": st.sampled_from((0, 3, 8)),
                "watermark_blocks": st.integers(0, 2),
            }
        ),
        is_prefix_caching=st.booleans(),
        has_priorities=st.booleans(),
    )
    def begin(self, num_blocks: int, limits: dict[str, int], is_prefix_caching: bool, has_priorities: bool) -> None:
        self.has_priorities = has_priorities
        self.limits = limits
        self.max_num_tokens = min(num_blocks * BLOCK_SIZE, 40)
        self.connector = StubConnector()
        self.scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=40,
            connector=self.connector,
            enable_prefix_caching=is_prefix_caching,
            **limits,
        )
        self.worker = WatchedWorker(num_blocks, BLOCK_SIZE, self.connector, look_at=self._assert_lawful)
        self.engine = Engine(self.scheduler, self.worker)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.quarantined: dict[str, StubTransfer] = {}

    # What may happen

    def _add(self, prompt: tuple[int, int, int], sampling: dict, **fields) -> Request:
        """Prompts of one family begin alike; the tail makes some of them differ in the middle of a block."""
        family, num_common, num_own = prompt
        own = [300 + len(self.requests)] * num_own
        request = make_request(
            prompt=[*range(family, family + num_common), *own],
            request_id=f"r{len(self.requests):03}",
            priority=len(self.requests) % 3 - 1 if self.has_priorities else 0,
            **fields,
            **sampling,
        )
        self.requests[request.request_id] = request
        return request

    @rule(prompt=prompts, sampling=samplings, salt=st.sampled_from(("", "", "salt")))
    def add(self, prompt: tuple[int, int, int], sampling: dict, salt: str) -> None:
        self.engine.add_request(self._add(prompt, sampling, cache_salt=salt))

    @rule(
        prompt=prompts, sampling=samplings, num_tokens=st.integers(1, 24), is_async=st.booleans(), fails=st.booleans()
    )
    def add_remote(self, prompt, sampling, num_tokens: int, is_async: bool, fails: bool) -> None:
        request = self._add(prompt, sampling)
        self.connector.answers[request.request_id] = (num_tokens, is_async)
        if fails:
            self.worker.failing_loads.add(request.request_id)
        self.engine.add_request(request)

    @rule(prompt=prompts, sampling=samplings)
    def add_ship(self, prompt, sampling) -> None:
        self.engine.add_request(self._add(prompt, sampling, kv_transfer="ship"))

    @rule(prompt=prompts, sampling=samplings)
    def add_undecided(self, prompt, sampling) -> None:
        request = self._add(prompt, sampling)
        self.connector.answers[request.request_id] = (None, False)
        self.engine.add_request(request)

    @rule(data=st.data(), answer=st.sampled_from(((0, False), (8, True), (8, False))))
    def decide(self, data, answer: tuple[int, bool]) -> None:
        undecided = [name for name, (num_tokens, _) in self.connector.answers.items() if num_tokens is None]
        if undecided:
            self.connector.answers[data.draw(st.sampled_from(undecided))] = answer

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule(data=st.data())
    @precondition(lambda self: self._live())
    def abort(self, data) -> None:
        self.engine.abort_request(data.draw(st.sampled_from(self._live())))

    @rule(data=st.data())
    @precondition(lambda self: self._live())
    def refuse_a_name_in_use(self, data) -> None:
        name = data.draw(st.sampled_from(self._live()))
        with pytest.raises(RequestError):
            self.engine.add_request(make_request(3, request_id=name))

    @rule(data=st.data(), how=st.sampled_from(("token", "token", "no token", "fail", "fail unfenced")))
    @precondition(lambda self: self._open_loads())
    def end_load(self, data, how: str) -> None:
        self._end_load(data.draw(st.sampled_from(self._open_loads())), how)

    @rule(data=st.data())
    @precondition(lambda self: self.quarantined)
    def end_quarantine(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.worker.poison(self.quarantined.pop(name))
        self.connector.close(name)

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: self.connector.ships)
    def end_ship(self, data, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.connector.ships)))
        if fails:
            self.connector.fail(name)
        elif self._is_prompt_computed(self.requests[name]):
            self._end_ship(name)

    @rule(data=st.data(), kind=st.sampled_from(("received", "failed", "sent")))
    @precondition(lambda self: self.requests)
    def repeat_a_report(self, data, kind: str) -> None:
        """Late, repeated, or never asked for: about a request without transfers, or as if its ship had been a load."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self._is_owed_a_report(name) and (kind, name in self.connector.ships) != ("received", True):
            return
        match kind:
            case "received":
                self.connector.finish_load(name, first_token=7)
            case "failed":
                self.connector.fail(name, "late")
            case "sent":
                self.connector.close(name)

    # Always

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_loading <= self.limits["max_num_seqs"]
        live = self.scheduler._roster.requests.values()
        num_placed = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_loading
        assert num_placed == len(live)
        held = Counter(block_id for request in live for block_id in request.block_ids)
        assert dict(held) == {i: n for i, n in enumerate(self.scheduler.pool._num_refs) if n}

    def teardown(self) -> None:
        """Everything comes to its end, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        self.connector.answers = {
            name: (num_tokens or 0, is_async) for name, (num_tokens, is_async) in self.connector.answers.items()
        }
        for _ in range(2000):
            if self.scheduler.is_idle():
                break
            for name in self._open_loads():
                self._end_load(name, "token")
            for name in list(self.quarantined):
                self.worker.poison(self.quarantined.pop(name))
                self.connector.close(name)
            for name in [name for name in self.connector.ships if self._is_prompt_computed(self.requests[name])]:
                self._end_ship(name)
            self._step()
        self._assert_nothing_is_left()
        for name, request in self.requests.items():
            self._assert_one_right_answer(request, self.outputs.get(name, []))

    # How

    def _live(self) -> list[str]:
        return sorted(self.scheduler._roster.requests)

    def _open_loads(self) -> list[str]:
        return sorted(name for name, load in self.connector.loads.items() if name not in self.quarantined)

    def _is_owed_a_report(self, name: str) -> bool:
        """A transfer of it is open, or will be, or its end has not been told yet."""
        connector, request = self.connector, self.requests[name]
        will_be = not request.is_finished and name not in [n for n, *_ in connector.allocated]
        is_untold = name in connector._received or name in connector._failed or name in connector._sent
        return will_be or is_untold or name in connector.loads or name in connector.ships

    def _is_prompt_computed(self, request: Request) -> bool:
        return request.is_finished or request.num_computed_tokens >= request.num_prompt_tokens

    def _step(self) -> None:
        for output in self.engine.step():
            self.outputs.setdefault(output.request_id, []).append(output)

    def _end_load(self, name: str, how: str) -> None:
        load = self.connector.loads[name]
        if load.request.is_finished and how != "fail unfenced":
            self.worker.poison(load)  # written late; and a cancelled load is reported as closed
            self.connector.close(name)
        elif how == "fail unfenced":
            self.connector.fail(name, is_fenced=False)
            self.quarantined[name] = load
        elif how == "fail":
            self.worker.poison(load)
            self.connector.fail(name)
        else:
            self.worker.fill(load)
            first_token = undisturbed_output(load.request, self.max_num_tokens)[0]
            self.connector.finish_load(name, first_token if how == "token" else None)

    def _end_ship(self, name: str) -> None:
        """The other side read the blocks up to this moment: they must still be right."""
        ship = self.connector.ships[name]
        if ship.request.state in (S.RUNNING, *NORMAL_ENDS):
            assert self.worker.read(ship.block_ids, ship.end) == list(ship.request.prompt_token_ids)
        self.connector.finish_ship(name)

    def _assert_lawful(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.limits["max_num_batched_tokens"]
        pool = self.scheduler.pool
        written: set[int] = set()
        for share in batch.requests:
            end = share.num_computed_tokens + len(share.token_ids)
            assert share.token_ids
            assert len(share.block_ids) == len(set(share.block_ids))
            assert len(share.block_ids) * BLOCK_SIZE >= end
            own = set(share.block_ids[share.num_computed_tokens // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
            assert not own & written, "two requests write into one block"
            written |= own
            assert all(pool._num_refs[block_id] == 1 for block_id in own)

    def _assert_nothing_is_left(self) -> None:
        pool = self.scheduler.pool
        assert self.scheduler.is_idle(), "something is stuck"
        assert not self.scheduler.has_work()
        assert (pool.num_free, pool.num_held, pool.num_pinned) == (pool.num_blocks, 0, 0)
        assert sorted(self.connector.finished) == sorted(self.requests)

    def _assert_one_right_answer(self, request: Request, outputs: list[RequestOutput]) -> None:
        assert [output.finish_state is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        made = [token.token_id for output in outputs for token in output.new_tokens]
        expected = undisturbed_output(request, self.max_num_tokens)
        if request.state in NORMAL_ENDS:
            assert made == expected
        else:
            assert made == expected[: len(made)]


def test_random_lives() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
