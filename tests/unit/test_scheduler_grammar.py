"""Requests with a grammar: how they wait for it, what it allows at each step, and how it ends them."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from engine.batch import BatchResult
from engine.engine import Engine
from engine.errors import ErrorKind, RequestError
from engine.grammar import Grammar, GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_matcher import GrammarMatcher
from engine.request import Request, RequestState, SampledToken
from tests.builders import (
    EOS,
    ScriptedWorker,
    StubConnector,
    final_of,
    make_request,
    make_scheduler,
    run_until_idle,
    token_ids_of,
)
from tests.tiny_models import VOCAB_SIZE, save_tokenizer

S = RequestState
A, B, C = 64, 65, 66


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return GrammarCompiler(directory, VOCAB_SIZE, [EOS])


class StubPool:
    """Grammars are compiled when the test says so."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.asked: dict[Grammar, Future[GrammarMatcher]] = {}

    def find(self, grammar: Grammar) -> Future[GrammarMatcher]:
        return self.asked.setdefault(grammar, Future())

    def finish(self, grammar: Grammar) -> None:
        self.find(grammar).set_result(self.compiler.compile(grammar))


class Rig:
    def __init__(self, pool: StubPool, **settings) -> None:
        self.pool = pool
        self.connector = settings.pop("connector", None)
        self.scheduler = make_scheduler(grammars=pool, connector=self.connector, **settings)
        self.worker = ScriptedWorker(self.connector)
        self.engine = Engine(self.scheduler, self.worker)

    def add(self, request_id: str, grammar: Grammar | None = None, num_tokens: int = 5, **fields) -> Request:
        request = make_request(num_tokens, request_id=request_id, grammar=grammar, **fields)
        self.engine.add_request(request)
        return request

    def step(self) -> list[str]:
        """Who ran in it."""
        self.engine.step()
        return [scheduled.request_id for scheduled in self.worker.batches[-1].requests]

    def run(self, request_id: str):
        outputs = run_until_idle(self.engine)
        return token_ids_of(outputs, request_id), final_of(outputs, request_id)


@pytest.fixture
def pool(compiler: GrammarCompiler) -> StubPool:
    return StubPool(compiler)


@pytest.fixture
def rig(pool: StubPool) -> Iterator[Rig]:
    rig = Rig(pool)
    yield rig
    rig.engine.abort_all()
    run_until_idle(rig.engine)
    rig.scheduler.check()
    assert rig.scheduler._grammar_room._waiting == {}


def allowed(scheduled) -> set[int]:
    bits = int.from_bytes(scheduled.token_mask, "little")
    return {i for i in range(VOCAB_SIZE) if bits >> i & 1} - set(scheduled.banned_token_ids)


# Waiting


def test_others_run_meanwhile_and_the_line_keeps_its_order(rig: Rig) -> None:
    slow, quick = regex("a+"), regex("b+")
    for name, grammar in (("a", slow), ("b", None), ("c", quick), ("d", None), ("e", slow)):
        rig.add(name, grammar)
    assert rig.step() == ["b", "d"]
    assert [request.request_id for request in rig.scheduler._roster.waiting] == ["a", "c", "e"]
    rig.pool.finish(quick)
    rig.add("f")
    rig.worker.script("c", [B] * 9)
    assert rig.step() == ["b", "d", "c", "f"]
    rig.worker.script("a", [A] * 9)
    rig.worker.script("e", [A] * 9)
    rig.pool.finish(slow)
    assert rig.step() == ["b", "d", "c", "f", "a", "e"]


def test_it_is_no_work_until_the_grammar_is_there(rig: Rig) -> None:
    request = rig.add("r", regex("a+"))
    assert rig.step() == []
    assert request.state is S.WAITING_FOR_GRAMMAR
    assert not rig.scheduler.has_work()
    assert not rig.scheduler.is_idle()
    rig.pool.finish(regex("a+"))
    rig.worker.script("r", [A, EOS])
    assert rig.run("r")[0] == [A, EOS]
    states = [state for state, _ in request.history]
    assert states == [S.WAITING, S.WAITING_FOR_GRAMMAR, S.WAITING, S.RUNNING, S.FINISHED_STOPPED]


def test_a_known_grammar_costs_no_step(rig: Rig) -> None:
    rig.pool.finish(regex("a+"))
    rig.worker.script("r", [A] * 99)
    rig.add("r", regex("a+"))
    assert rig.step() == ["r"]


def test_a_grammar_that_cannot_be_compiled_ends_its_requests_alone(rig: Rig) -> None:
    for name in ("bad", "worse"):
        rig.add(name, regex("a("))
    rig.add("good", max_tokens=3)
    rig.step()
    rig.pool.find(regex("a(")).set_exception(GrammarError("unclosed group"))
    outputs = run_until_idle(rig.engine)
    for name in ("bad", "worse"):
        assert final_of(outputs, name).error == (ErrorKind.INVALID_REQUEST, "unclosed group")
    assert final_of(outputs, "good").finish_state is S.FINISHED_LENGTH


def test_an_abort_while_it_is_compiled(rig: Rig) -> None:
    rig.add("r", regex("a+"))
    rig.step()
    rig.engine.abort_request("r")
    assert final_of(rig.engine.step(), "r").finish_state is S.FINISHED_ABORTED
    assert rig.scheduler.is_idle()
    rig.pool.finish(regex("a+"))
    assert rig.step() == []


def test_an_engine_without_grammars_refuses_the_request() -> None:
    with pytest.raises(RequestError, match="grammars") as raised:
        make_scheduler().add_request(make_request(grammar=regex("a")))
    assert raised.value.param == "response_format"


def test_output_that_is_there_already_is_replayed(rig: Rig) -> None:
    request = rig.add("r", regex("abc"))
    for token_id in (A, B):
        request.append_output(SampledToken(token_id))
    rig.pool.finish(regex("abc"))
    rig.worker.script("r", [C])
    assert rig.step() == ["r"]
    assert allowed(rig.worker.batches[-1].requests[0]) == {C}
    assert request.state is S.FINISHED_STOPPED


# What is allowed


def test_only_sampled_rows_carry_a_mask(pool: StubPool) -> None:
    rig = Rig(pool, max_num_batched_tokens=16, max_num_seqs=8, long_prefill_token_threshold=8)
    pool.finish(regex("ab"))
    rig.worker.script("r", [A, B])
    rig.add("r", regex("ab"), num_tokens=12)
    rig.add("plain", num_tokens=2, max_tokens=1)
    rig.run("r")
    shares = [s for batch in rig.worker.batches for s in batch.requests]
    masks = [(s.request_id, allowed(s)) for s in shares]
    assert masks == [("r", set()), ("plain", set()), ("r", {A}), ("r", {B})]
    assert [s.sampling is None for s in shares] == [True, False, False, False]


@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_a_complete_grammar_ends_the_request_whatever_else_was_asked_for(rig: Rig, ending: dict) -> None:
    rig.pool.finish(regex("ab"))
    rig.worker.script("r", [A, B])
    rig.add("r", regex("ab"), max_tokens=9, **ending)
    token_ids, final = rig.run("r")
    assert (token_ids, final.finish_state, final.is_last_text) == ([A, B], S.FINISHED_STOPPED, True)


def test_the_last_token_that_fits_may_complete_it(rig: Rig) -> None:
    rig.pool.finish(regex("abc"))
    for name, max_tokens in (("cut", 2), ("whole", 3)):
        rig.worker.script(name, [A, B, C])
        rig.add(name, regex("abc"), max_tokens=max_tokens)
    outputs = run_until_idle(rig.engine)
    assert final_of(outputs, "cut").finish_state is S.FINISHED_LENGTH
    assert final_of(outputs, "whole").finish_state is S.FINISHED_STOPPED


def test_min_tokens_bans_the_end_only_while_something_else_may_come(rig: Rig) -> None:
    rig.pool.finish(regex("a*"))
    rig.worker.script("r", [A, A, EOS])
    rig.add("r", regex("a*"), min_tokens=2)
    token_ids, final = rig.run("r")
    assert [allowed(batch.requests[0]) - {A} for batch in rig.worker.batches if batch.requests] == [
        set(),
        set(),
        {EOS},
    ]
    assert (token_ids, final.finish_state, final.is_last_text) == ([A, A, EOS], S.FINISHED_STOPPED, False)


def test_a_grammar_goes_before_stop_tokens_and_min_tokens(rig: Rig) -> None:
    """All that may come is banned: the row would have nothing to sample."""
    rig.pool.finish(regex("ab"))
    rig.worker.script("r", [A, B])
    rig.add("r", regex("ab"), min_tokens=2, stop_token_ids=(A,))
    rig.step()
    assert allowed(rig.worker.batches[-1].requests[0]) == {A}


def test_a_stop_token_ends_it_within_the_grammar(rig: Rig) -> None:
    rig.pool.finish(regex("abc"))
    rig.worker.script("r", [A, B, C])
    rig.add("r", regex("abc"), stop_token_ids=(B,))
    token_ids, final = rig.run("r")
    assert (token_ids, final.finish_state, final.stop_reason) == ([A, B], S.FINISHED_STOPPED, B)


def test_a_token_that_does_not_follow_is_our_fault_and_ends_that_request_alone(rig: Rig) -> None:
    rig.pool.finish(regex("ab"))
    rig.worker.script("r", [A, C])
    rig.add("r", regex("ab"))
    rig.add("other", max_tokens=3)
    outputs = run_until_idle(rig.engine)
    final = final_of(outputs, "r")
    assert final.error is not None
    assert final.error[0] is ErrorKind.INTERNAL
    assert "does not follow" in final.error[1]
    assert token_ids_of(outputs, "r") == [A]
    assert final_of(outputs, "other").finish_state is S.FINISHED_LENGTH


def test_one_that_has_become_too_complex_is_the_clients_fault(rig: Rig) -> None:
    properties = ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(1000))
    grammar = Grammar("json_schema", f'{{"type":"object","properties":{{{properties}}},"additionalProperties":false}}')
    rig.pool.finish(grammar)
    rig.worker.script("r", [90])
    rig.add("r", grammar)
    rig.engine.step()
    batch = rig.scheduler.schedule()
    outputs = rig.scheduler.update(batch, BatchResult(unsampled={"r": "no finite logits"}))
    kind, reason = final_of(outputs, "r").error or (None, "")
    assert (kind, "too complex" in reason) == (ErrorKind.INVALID_REQUEST, True)


# Beside the rest of a request's life


def test_preemption_loses_nothing(pool: StubPool) -> None:
    grammar = regex("(abc)+")
    pool.finish(grammar)
    rig = Rig(pool, num_blocks=4, block_size=4, max_num_batched_tokens=32)
    for name in ("older", "younger"):
        rig.worker.script(name, [A, B, C] * 2)
    rig.add("older", grammar, num_tokens=6, max_tokens=6)
    younger = rig.add("younger", grammar, num_tokens=6, max_tokens=6)
    outputs = run_until_idle(rig.engine)
    assert younger.num_preemptions > 0
    for name in ("older", "younger"):
        assert token_ids_of(outputs, name) == [A, B, C] * 2
    masks = [allowed(s) for batch in rig.worker.batches for s in batch.requests if s.request_id == "younger"]
    assert masks == [{A}, {B}, {C}, {A, EOS}, {B}, {C}], "each place once, also across the recomputation"


@pytest.mark.parametrize(
    ("grammar", "first", "end"),
    [
        (regex("ab"), A, None),
        (regex("a"), A, (S.FINISHED_STOPPED, None)),
        (regex("ab"), B, (S.FINISHED_ERROR, ErrorKind.INTERNAL)),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_token_comes_with_the_load(pool: StubPool, grammar: Grammar, first: int, end, is_early: bool) -> None:
    connector = StubConnector(answers={"r": (5, True)})
    rig = Rig(pool, connector=connector)
    request = rig.add("r", grammar)
    rig.step()
    assert connector.allocated == [], "it holds nothing while it waits for the grammar"
    pool.finish(grammar)
    rig.step()
    assert request.state is S.WAITING_FOR_REMOTE_KVS
    if is_early:
        connector.admit_early("r", first)
    else:
        connector.finish_load("r", first_token=first)
    outputs = rig.engine.step()
    if is_early:
        connector.finish_load("r")
    if end is not None:
        final = final_of(outputs, "r")
        assert (final.finish_state, final.error and final.error[0]) == end
    else:
        rig.worker.script("r", [B])
        rig.step()
        assert allowed(rig.worker.batches[-1].requests[0]) == {B}
        assert request.state is S.FINISHED_STOPPED
    run_until_idle(rig.engine)
    rig.scheduler.check()
