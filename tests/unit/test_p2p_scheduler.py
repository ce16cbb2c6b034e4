import pytest

from connector.p2p_scheduler import HoldKV, P2PSchedulerConnector, PullKV, RemotePrefill, Save, ShipKV
from connector.transfer_settings import TransferSettings
from engine.batch import Batch, ConnectorOutput, LoadFailure, LoadResult, ScheduledRequest
from engine.errors import ErrorKind
from engine.request import Request, RequestState, SampledToken
from engine.sampling_params import SamplingParams


def make_connector(load_mode: str = "async", **settings: object) -> P2PSchedulerConnector:
    has_ready_peer = settings.pop("has_ready_peer", lambda candidates: True)
    settings = {"remote_prefill_threshold": 0, "load_mode": load_mode} | settings
    return P2PSchedulerConnector(TransferSettings(**settings), has_ready_peer, lambda request, blocks: {"held": blocks})


def make_request(num_tokens: int, kv_transfer: object, request_id: str = "r") -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling=SamplingParams(max_tokens=4),
        kv_transfer=kv_transfer,
    )


def step(request: Request, start: int, end: int) -> Batch:
    scheduled = ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids[start:end],
        num_computed_tokens=start,
        block_ids=range(8),
        sampling=None,
    )
    return Batch(step=1, requests=(scheduled,))


def test_w1_external_tokens_are_those_beyond_the_local_hit():
    connector = make_connector("async")
    request = make_request(10, PullKV("p0", "e", "lease", 8))
    assert connector.get_num_new_matched_tokens(request, 3) == (5, True)
    assert connector.get_num_new_matched_tokens(request, 8) == (0, False)


def test_the_whole_prompt_is_external_and_asking_changes_nothing():
    connector = make_connector("async")
    request = make_request(33, RemotePrefill())
    assert [connector.get_num_new_matched_tokens(request, 16) for _ in range(3)] == [(17, True)] * 3
    assert not connector.has_open_transfers()


def test_a_sync_load_leaves_the_last_prompt_token_to_this_node():
    connector = make_connector("sync")
    assert connector.get_num_new_matched_tokens(make_request(33, RemotePrefill()), 0) == (32, False)
    assert connector.get_num_new_matched_tokens(make_request(33, RemotePrefill()), 32) == (0, False)


def test_a_request_without_transfer_is_left_alone():
    connector = make_connector("async")
    request = make_request(33, None)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, range(3), 0)
    assert connector.build_connector_meta(step(request, 0, 33)).saves == ()
    assert connector.request_finished(request, range(3)) == (False, None)


def test_a_load_is_told_once_and_open_until_reported():
    connector = make_connector("async")
    request = make_request(33, RemotePrefill(("p0",)))
    connector.update_state_after_alloc(request, [4, 5, 6], 17)
    (load,) = connector.build_connector_meta(Batch(step=1)).loads
    assert (load.start, load.end, load.block_ids, load.source.candidates) == (16, 33, (4, 5, 6), ("p0",))
    assert connector.build_connector_meta(Batch(step=2)).loads == ()
    assert connector.has_open_transfers()
    assert not connector.has_pending_metadata()
    connector.update_connector_output(ConnectorOutput(received={"r": LoadResult()}))
    assert not connector.has_open_transfers()
    assert connector.request_finished(request, [4, 5, 6]) == (False, None)


def test_an_aborted_load_stays_open_until_the_worker_side_reports():
    connector = make_connector("async")
    request = make_request(33, RemotePrefill())
    connector.update_state_after_alloc(request, [4, 5, 6], 33)
    assert connector.request_finished(request, [4, 5, 6]) == (True, None)
    assert connector.build_connector_meta(Batch(step=1)).cancelled == ("r",)
    assert connector.has_open_transfers()
    connector.update_connector_output(ConnectorOutput(sent=frozenset({"r"})))
    assert not connector.has_open_transfers()


def test_an_unfenced_failure_leaves_the_load_open():
    connector = make_connector("async")
    connector.update_state_after_alloc(make_request(33, RemotePrefill()), [4, 5, 6], 33)
    connector.build_connector_meta(Batch(step=1))
    failure = LoadFailure(kind=ErrorKind.PEER_UNREACHABLE, reason="silent", is_fenced=False)
    connector.update_connector_output(ConnectorOutput(failed={"r": failure}))
    assert connector.has_open_transfers()
    connector.update_connector_output(ConnectorOutput(sent=frozenset({"r"})))
    assert not connector.has_open_transfers()


def test_each_chunk_ships_what_is_new_and_the_first_ships_the_prefix_hit_too():
    connector = make_connector("async")
    request = make_request(50, ShipKV(16, 50))
    connector.update_state_after_alloc(request, range(8), 0)
    # The prefill node found [0, 32) in its own cache; the decode node lacks [16, 50).
    spans = [connector.build_connector_meta(step(request, a, b)).saves for a, b in [(32, 40), (40, 50), (50, 51)]]
    blocks = tuple(range(8))
    assert spans == [
        (Save(request_id="r", span=range(16, 40), block_ids=blocks),),
        (Save(request_id="r", span=range(40, 50), block_ids=blocks),),
        (),
    ]


def test_what_is_recomputed_after_a_preemption_is_not_shipped_again():
    connector = make_connector("async")
    request = make_request(50, ShipKV(0, 50))
    connector.update_state_after_alloc(request, range(8), 0)
    connector.build_connector_meta(step(request, 0, 30))
    connector.update_state_after_alloc(request, range(8), 0)
    (save,) = connector.build_connector_meta(step(request, 0, 50)).saves
    assert save.span == range(30, 50)


def test_a_finished_prefill_hands_over_its_first_token_and_stays_held():
    connector = make_connector("async")
    request = make_request(20, ShipKV(0, 20))
    connector.update_state_after_alloc(request, range(8), 0)
    token = SampledToken(7, -0.5)
    request.append_output(token)
    request.num_cached_tokens = 16
    request.state = RequestState.FINISHED_LENGTH
    assert connector.request_finished(request, range(2)) == (True, None)
    (ended,) = connector.build_connector_meta(Batch(step=1)).ended
    assert (ended.first_token, ended.num_cached_tokens, ended.error) == (token, 16, None)
    connector.update_connector_output(ConnectorOutput(sent=frozenset({"r"})))
    assert not connector.has_open_transfers()


def test_a_first_token_that_is_not_wanted_is_not_handed_over():
    connector = make_connector("async")
    request = make_request(20, ShipKV(0, 20, wants_first_token=False))
    request.append_output(SampledToken(7))
    request.state = RequestState.FINISHED_LENGTH
    connector.request_finished(request, range(2))
    assert connector.build_connector_meta(Batch(step=1)).ended[0].first_token is None


def test_an_aborted_prefill_ends_with_an_error():
    connector = make_connector("async")
    request = make_request(20, ShipKV(0, 20))
    request.state = RequestState.FINISHED_ABORTED
    assert connector.request_finished(request, ()) == (False, None)
    (ended,) = connector.build_connector_meta(Batch(step=1)).ended
    assert ended.error == (ErrorKind.KV_LOAD_FAILED, "the prefill was aborted")


def test_little_that_is_missing_is_computed_here_and_counted():
    connector = make_connector(remote_prefill_threshold=16)
    request = make_request(40, RemotePrefill())
    assert connector.get_num_new_matched_tokens(request, 24) == (16, True)
    assert connector.get_num_new_matched_tokens(request, 25) == (0, False)
    request.num_computed_tokens = 25
    connector.update_state_after_alloc(request, range(10), 0)
    assert connector.local_prefills.num_short == 1
    assert not connector.has_open_transfers()


def test_without_a_ready_node_the_fallback_decides():
    request = make_request(40, RemotePrefill(("p0",)))
    local = make_connector(has_ready_peer=lambda candidates: False)
    assert local.get_num_new_matched_tokens(request, 0) == (0, False)
    local.update_state_after_alloc(request, range(10), 0)
    assert local.local_prefills.num_without_node == 1
    fail = make_connector(has_ready_peer=lambda candidates: False, fallback="fail")
    assert fail.get_num_new_matched_tokens(request, 0) == (40, True)


def test_a_request_that_may_not_load_any_more_is_not_counted_again():
    connector = make_connector(has_ready_peer=lambda candidates: False)
    request = make_request(40, RemotePrefill())
    request.may_load = False
    connector.update_state_after_alloc(request, range(10), 0)
    assert connector.local_prefills.num_without_node == 0


def test_open_loads_of_the_batch_are_waited_for_at_each_layer():
    connector = make_connector("sync")
    request, other = make_request(33, RemotePrefill()), make_request(8, None, "other")
    connector.update_state_after_alloc(request, [4, 5, 6], 32)
    batch = Batch(step=1, requests=(*step(request, 32, 33).requests, *step(other, 0, 8).requests))
    assert connector.build_connector_meta(batch).barrier_ids == ("r",)
    connector.update_connector_output(ConnectorOutput(received={"r": LoadResult()}))
    assert connector.build_connector_meta(batch).barrier_ids == ()


def test_only_shipped_requests_are_pinned_for_shipping():
    connector = make_connector()
    assert connector.ships_kv(make_request(8, ShipKV(0, 8)))
    assert not connector.ships_kv(make_request(8, RemotePrefill()))
    assert not connector.ships_kv(make_request(8, None))


def test_held_kv_stays_until_its_lease_is_over():
    connector = make_connector()
    request = make_request(20, HoldKV())
    assert not connector.ships_kv(request)
    request.state = RequestState.FINISHED_LENGTH
    assert connector.request_finished(request, [4, 5]) == (True, {"held": [4, 5]})
    assert connector.has_open_transfers()
    connector.update_connector_output(ConnectorOutput(sent=frozenset({"r"})))
    assert not connector.has_open_transfers()


@pytest.mark.parametrize("state", [RequestState.FINISHED_ABORTED, RequestState.FINISHED_ERROR])
def test_nothing_is_held_of_a_request_that_did_not_end_well(state: RequestState):
    connector = make_connector()
    request = make_request(20, HoldKV())
    request.state = state
    assert connector.request_finished(request, [4, 5]) == (False, None)


def test_what_was_pulled_may_be_held_in_turn():
    connector = make_connector()
    request = make_request(20, PullKV("p0", "e", "lease", 20, is_held_after=True))
    connector.update_state_after_alloc(request, [4, 5], 20)
    connector.update_connector_output(ConnectorOutput(received={"r": LoadResult()}))
    request.state = RequestState.FINISHED_LENGTH
    assert connector.request_finished(request, [4, 5]) == (True, {"held": [4, 5]})
    assert connector.has_open_transfers()


def test_held_kv_that_is_not_needed_or_not_reached_is_released_once():
    source = PullKV("p0", "e", "lease", 20)
    connector = make_connector()
    connector.update_state_after_alloc(make_request(20, source), [4, 5], 0)
    assert connector.has_pending_metadata()
    assert connector.build_connector_meta(Batch(step=1)).released == (source,)
    queued = make_request(20, source)
    queued.state = RequestState.FINISHED_ABORTED
    connector.request_finished(queued, ())
    assert connector.build_connector_meta(Batch(step=2)).released == (source,)
    assert not connector.has_open_transfers()


def test_a_pull_is_open_until_reported_like_any_load():
    connector = make_connector()
    request = make_request(40, PullKV("p0", "e", "lease", 32))
    assert connector.get_num_new_matched_tokens(request, 16) == (16, True)
    connector.update_state_after_alloc(request, [4, 5, 6], 16)
    (load,) = connector.build_connector_meta(Batch(step=1)).loads
    assert (load.start, load.end) == (16, 32)
    assert connector.request_finished(request, [4, 5, 6]) == (True, None)
