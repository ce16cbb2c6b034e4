import pytest

from engine.errors import InvalidTransition
from engine.request import ALLOWED_MOVES, Request, RequestState, SampledToken
from tests.builders import EOS, FakeClock, make_request

S = RequestState
WAY_TO: dict[RequestState, list[RequestState]] = {
    S.WAITING: [],
    S.WAITING_FOR_GRAMMAR: [S.WAITING_FOR_GRAMMAR],
    S.WAITING_FOR_REMOTE_KVS: [S.WAITING_FOR_REMOTE_KVS],
    S.WAITING_FOR_STREAMING_REQ: [S.WAITING_FOR_STREAMING_REQ],
    S.RUNNING: [S.RUNNING],
    S.PREEMPTED: [S.RUNNING, S.PREEMPTED],
    S.FINISHED_STOPPED: [S.RUNNING, S.FINISHED_STOPPED],
    S.FINISHED_LENGTH: [S.RUNNING, S.FINISHED_LENGTH],
    S.FINISHED_ABORTED: [S.FINISHED_ABORTED],
    S.FINISHED_ERROR: [S.FINISHED_ERROR],
}


def request_in(state: RequestState) -> Request:
    request = make_request()
    for step in WAY_TO[state]:
        request.move(step, 100.0)
    return request


@pytest.mark.parametrize("target", S)
@pytest.mark.parametrize("source", S)
def test_moves_are_those_of_the_table(source: RequestState, target: RequestState) -> None:
    request = request_in(source)
    if target in ALLOWED_MOVES[source]:
        request.move(target, 101.0)
        assert request.state is target
        assert request.history[-1] == (target, 101.0)
    else:
        with pytest.raises(InvalidTransition, match=f"{source.name} -> {target.name}"):
            request.move(target, 101.0)
        assert request.state is source


@pytest.mark.parametrize("state", S)
def test_every_live_state_can_be_aborted_and_no_finished_one_left(state: RequestState) -> None:
    assert (S.FINISHED_ABORTED in ALLOWED_MOVES[state]) is not state.is_finished
    assert (S.FINISHED_ERROR in ALLOWED_MOVES[state]) is not state.is_finished
    assert state.is_finished is state.name.startswith("FINISHED")


def test_a_wrong_move_tells_the_story() -> None:
    clock = FakeClock()
    request = make_request(request_id="r9")
    clock.advance(0.25)
    request.move(S.RUNNING, clock())
    with pytest.raises(InvalidTransition, match=r"r9: RUNNING -> WAITING; WAITING@0.000s, RUNNING@0.250s"):
        request.move(S.WAITING, clock())


def feed(request: Request, *token_ids: int) -> list[RequestState | None]:
    states = []
    for token_id in token_ids:
        request.append_output(SampledToken(token_id))
        states.append(request.finish_state_for(token_id))
    return states


def test_eos_stops_without_a_stop_reason() -> None:
    request = make_request(max_tokens=5)
    assert feed(request, 7, EOS) == [None, S.FINISHED_STOPPED]
    assert request.stop_reason is None


def test_a_stop_token_is_the_stop_reason() -> None:
    request = make_request(max_tokens=5, stop_token_ids=(9,))
    assert feed(request, 9) == [S.FINISHED_STOPPED]
    assert request.stop_reason == 9


def test_ignore_eos_still_heeds_stop_tokens() -> None:
    request = make_request(max_tokens=5, ignore_eos=True, stop_token_ids=(9,))
    assert feed(request, EOS, 9) == [None, S.FINISHED_STOPPED]


def test_the_last_allowed_token_ends_by_length_unless_it_stops() -> None:
    assert feed(make_request(max_tokens=2), 7, 7) == [None, S.FINISHED_LENGTH]
    assert feed(make_request(max_tokens=2), 7, EOS) == [None, S.FINISHED_STOPPED]
    assert feed(make_request(max_tokens=1), 7) == [S.FINISHED_LENGTH]


def test_end_tokens_before_min_tokens_do_not_stop() -> None:
    assert feed(make_request(max_tokens=9, min_tokens=3), EOS, EOS, EOS) == [None, None, S.FINISHED_STOPPED]


def test_counters_follow_the_output() -> None:
    request = make_request(5)
    feed(request, 7, 8)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (5, 7, 2)
    assert request.token_ids[5:] == [7, 8]
