"""An engine is never killed, and never misled, by an event that comes late, twice, or out of nowhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.codec import encode
from connector.peer_messages import (
    CancelTransfer,
    Credit,
    FirstToken,
    PeerPing,
    PeerPong,
    PeerWelcome,
    PrefillDone,
    TransferClosed,
    TransferFailed,
    Unit,
)
from engine.errors import ErrorKind
from engine.request import SampledToken
from tests.faults.rig import GREEDY, LONG, QUICK, assert_right, assert_serves, fault_ring, make_prompt
from tests.message_relay import MessageRelay, drop, running_message_relay, twice
from tests.oracle import Oracle
from tests.ring import Ring, wait_until

EVERYTHING = (Unit, FirstToken, PrefillDone, TransferClosed, Credit, CancelTransfer, PeerPing, PeerPong)


@pytest.fixture(params=["zmq", "shm"])
def relayed(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[tuple[Ring, MessageRelay]]:
    with (
        running_message_relay() as relay,
        fault_ring(tiny_llama, relay=relay, transport=request.param, **QUICK) as ring,
    ):
        yield ring, relay


def test_every_message_twice(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    ring, relay = relayed
    for kind in EVERYTHING:
        relay.on(kind, twice)
    prompts = [make_prompt(5 + 4 * i, seed=i) for i in range(5)]
    answers = [ring.client.start(prompt, GREEDY)[1] for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_right(answer, oracle, prompt)
    wait_until(lambda: ring.decode.worker.receiver.counters.num_late_units > 0, "the late ones are counted")
    assert_serves(ring, oracle)


def test_units_in_reverse_order_and_again(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    ring, relay = relayed
    relay.hold(Unit, FirstToken, PrefillDone)
    prompt = make_prompt(21, seed=7)
    _, answer = ring.client.start(prompt, GREEDY)
    wait_until(lambda: relay.num_held(PrefillDone) == 1, "all of it is held")
    # The end must stay the end: order within one connection is the transport's promise.
    relay.release(order=lambda held: [*reversed(held[:3]), *held[:3], *held[3:]])
    assert_right(answer, oracle, prompt)


def test_all_that_belongs_to_an_aborted_load_comes_late_and_twice(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    ring, relay = relayed
    relay.hold(Unit, FirstToken, PrefillDone, TransferClosed)
    request_id, answer = ring.client.start(make_prompt(13, seed=8), LONG)
    wait_until(lambda: relay.num_held(Unit) > 0, "units are held")
    ring.client.cancel(request_id)
    assert answer.final.finish_reason == "abort"
    wait_until(lambda: not ring.prefill.worker.sender.open_transfer_ids(), "the prefill node has ended it")
    late_before = ring.decode.worker.receiver.counters.num_late_units
    relay.release(times=2)
    wait_until(lambda: ring.decode.worker.receiver.counters.num_late_units > late_before, "counted")
    assert_serves(ring, oracle)


def test_words_about_transfers_that_never_were(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    ring, relay = relayed
    assert_serves(ring, oracle)
    epoch = ring.decode.worker.receiver.peers[0].epoch
    named = {"transfer_id": "never-was", "epoch": epoch}
    before = ring.decode.worker.receiver.counters.num_late_units
    for message in (
        Unit(**named, layer=0, start=0, end=4, num_bytes=256, saved_at=0.0),
        Unit(**named, layer=99, start=7, end=3, num_bytes=2**40, saved_at=0.0),
        FirstToken(**named, token=SampledToken(5), num_cached_tokens=0),
        PrefillDone(**named, computed_at=0.0),
        TransferClosed(**named),
        TransferFailed(**named, kind=ErrorKind.INTERNAL, reason="?"),
    ):
        relay.say_to_decode([encode(message)])
    wait_until(lambda: ring.decode.worker.receiver.counters.num_late_units >= before + 4, "counted")
    assert_serves(ring, oracle)


def test_a_first_token_with_another_id_is_not_believed(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    ring, relay = relayed
    assert_serves(ring, oracle)
    served = {m.transfer_id for m in relay.seen if isinstance(m, FirstToken)}
    relay.hold(FirstToken)
    prompt = make_prompt(9, seed=9)
    _, answer = ring.client.start(prompt, GREEDY)
    wait_until(lambda: relay.num_held(FirstToken) == 2, "the true one is held, and its copy")
    (transfer_id,) = {m.transfer_id for m in relay.seen if isinstance(m, FirstToken)} - served
    forged = FirstToken(transfer_id=transfer_id, epoch="another life", token=SampledToken(1), num_cached_tokens=0)
    relay.say_to_decode([encode(forged)])
    relay.release()
    assert_right(answer, oracle, prompt)


def test_a_welcome_in_the_middle_of_a_transfer(relayed: tuple[Ring, MessageRelay], oracle: Oracle):
    """The same epoch again is no news; another one ends what was under way, and the answer is right all the same."""
    ring, relay = relayed
    assert_serves(ring, oracle)
    peer = ring.decode.worker.receiver.peers[0]
    # A writer into shared memory would have to be dead before another life is believed, and here it is this process.
    for epoch in (peer.epoch, "another life") if peer.transport == "zmq" else (peer.epoch,):
        relay.hold(PrefillDone)
        prompt = make_prompt(9, seed=len(epoch))
        _, answer = ring.client.start(prompt, GREEDY)
        wait_until(lambda: relay.num_held(PrefillDone) == 1, "in the middle")
        welcome = PeerWelcome(name=peer.name, epoch=epoch, transport=peer.transport, pid=1)
        relay.say_to_decode([encode(welcome)])
        wait_until(lambda epoch=epoch: peer.epoch == epoch, "heard")
        relay.release()
        assert_right(answer, oracle, prompt)


@pytest.mark.parametrize("lost", [FirstToken, PrefillDone, TransferClosed, Credit])
def test_a_lost_word_costs_time_and_no_answer(relayed: tuple[Ring, MessageRelay], oracle: Oracle, lost: type):
    ring, relay = relayed
    relay.on(lost, drop)
    prompt = make_prompt(17, seed=10)
    _, answer = ring.client.start(prompt, GREEDY)
    assert_right(answer, oracle, prompt)
    relay.on(lost, lambda frames: [frames])
    assert_serves(ring, oracle)
