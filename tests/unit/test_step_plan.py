"""What a request's share of a step says: what must not be sampled, and which prompt tokens are to be scored."""

import pytest

from engine.engine import Engine
from engine.errors import ErrorKind
from engine.grammar_matcher import GrammarMatcher
from engine.prompt_logprobs import WantedLogprobs
from engine.request import SampledToken
from engine.step_plan import StepPlan
from tests.builders import EOS, PagedWorker, final_of, make_request, make_scheduler, run_until_idle, token_ids_of


def share_of(request, budget: int = 100):
    plan = StepPlan(budget, 0)
    plan.add(request)
    return plan.scheduled[request.request_id]


BAD_WORDS = ((5,), (6, 7), (6, 6, 8), (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [5]),
        ([6], [5, 7]),
        ([6, 6], [5, 7, 8]),
        ([9, 6, 6], [5, 7, 8]),
        ([6, 6, 9], [5]),
        ([2, 3], [5]),
        ([1, 2, 3], [4, 5]),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(output: list[int], banned: list[int]):
    request = make_request(prompt=[1, 2, 3, 6], bad_words=BAD_WORDS)  # the prompt's end does not count
    for token_id in output:
        request.append_output(SampledToken(token_id))
    assert share_of(request).banned_token_ids == banned


def test_bad_words_and_min_tokens_together():
    request = make_request(3, bad_words=((9,),), min_tokens=1, stop_token_ids=(4,))
    assert share_of(request).banned_token_ids == [EOS, 4, 9]
    assert share_of(request, budget=2).banned_token_ids == (), "nothing is sampled"


class Masked(GrammarMatcher):
    """Allows always the same."""

    def __init__(self, *token_ids: int) -> None:
        self._allowed = sum(1 << token_id for token_id in token_ids).to_bytes(2, "little")

    def mask(self) -> bytes:
        return self._allowed


def test_a_grammar_goes_before_min_tokens_and_not_before_bad_words():
    request = make_request(3, bad_words=((9,),), min_tokens=1, stop_token_ids=(4,))
    for allowed, banned in (((EOS, 9, 3), [EOS, 4, 9]), ((EOS, 4), [9]), ((EOS, 9), [9]), ((9,), [9])):
        request.matcher = Masked(*allowed)
        assert share_of(request).banned_token_ids == banned


def test_no_output_holds_a_bad_word():
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    engine = Engine(scheduler, PagedWorker(64, 4))
    free = make_request(prompt=[3, 4], request_id="free", max_tokens=30, ignore_eos=True)
    engine.add_request(free)
    output = token_ids_of(run_until_idle(engine), "free")
    words = ((output[3],), tuple(output[8:10]), tuple(output[0:3]))
    engine.add_request(
        make_request(prompt=[3, 4], request_id="confined", max_tokens=30, ignore_eos=True, bad_words=words)
    )
    confined = token_ids_of(run_until_idle(engine), "confined")
    assert confined[:2] == output[:2]
    assert len(confined) == 30
    for word in words:
        assert not any(tuple(confined[i : i + len(word)]) == word for i in range(30))


def test_a_request_that_leaves_itself_no_token_is_its_users_fault():
    class Stuck(PagedWorker):
        """As the sampler finds it: no finite logits."""

        def execute(self, batch):
            result = super().execute(batch)
            unsampled = dict.fromkeys((r.request_id for r in batch.requests), "not finite")
            return type(result)(unsampled=unsampled, connector_output=result.connector_output)

    cases = {
        "allowed": ({"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))}, ErrorKind.INVALID_REQUEST),
        "all": ({"bad_words": tuple((i,) for i in range(10))}, ErrorKind.INVALID_REQUEST),
        "one left": ({"allowed_token_ids": (5, 6), "bad_words": ((5,),)}, ErrorKind.INTERNAL),
        "no bans": ({}, ErrorKind.INTERNAL),
    }
    scheduler = make_scheduler(vocab_size=10)
    engine = Engine(scheduler, Stuck(64, 16))
    for name, (sampling, _) in cases.items():
        engine.add_request(make_request(prompt=[1, 2], request_id=name, **sampling))
    outputs = run_until_idle(engine)
    kinds = {name: final_of(outputs, name).error[0] for name in cases}
    assert kinds == {name: kind for name, (_, kind) in cases.items()}


def test_each_chunk_scores_the_tokens_after_its_own():
    request = make_request(prompt=[1, 2, 3, 4, 5], prompt_logprobs=2)
    assert share_of(request, budget=2).prompt_logprobs == WantedLogprobs(2, [2, 3])
    request.num_computed_tokens = 2
    assert share_of(request, budget=2).prompt_logprobs == WantedLogprobs(2, [4, 5])
    request.num_computed_tokens = 4
    assert share_of(request).prompt_logprobs is None, "only an output token follows"
    request.num_computed_tokens = 0
    assert share_of(request).prompt_logprobs == WantedLogprobs(2, [2, 3, 4, 5])
    assert share_of(make_request(5)).prompt_logprobs is None
