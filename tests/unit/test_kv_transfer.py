"""A `KVReceiver` and a `KVSender` joined by links that the test pumps by hand."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace

from connector.codec import PROTOCOL_VERSION, encode
from connector.identity import ModelIdentity, NodeIdentity
from connector.kv_receiver import KVReceiver
from connector.kv_sender import KVSender
from connector.leases import Lease, LeaseTable, prompt_digest
from connector.loads import FinishedLoads, LoadOrder
from connector.memory_link import MemoryLinks, MemoryNetwork
from connector.p2p_scheduler import PullKV
from connector.peer_messages import (
    CancelTransfer,
    Credit,
    FirstToken,
    PeerHello,
    PeerPong,
    PeerWelcome,
    Prefill,
    PrefillDone,
    Pull,
    TransferClosed,
    Unit,
    decode_from_prefill_node,
)
from connector.shared_kv import SharedKVMemory
from connector.transfer_settings import TransferSettings
from engine.batch import LoadResult
from engine.errors import ErrorKind, MalformedMessage
from engine.request import SampledToken
from engine.sampling_params import SamplingParams
from tests.builders import FakeClock

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 8, 4
SHAPE = (NUM_BLOCKS, 2, BLOCK_SIZE, 2, 4)
LAYER_BYTES = 4 * torch.Size(SHAPE).numel()
UNIT_BYTES_PER_TOKEN = 2 * 2 * 4 * 4
IDENTITY = ModelIdentity(
    config_digest="c", weights_digest="w", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4
)


@dataclass
class RecordingTaker:
    grants: list[Prefill] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_wakes: int = 0

    def take_grant(self, grant: Prefill) -> None:
        self.grants.append(grant)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def wake(self) -> None:
        self.num_wakes += 1


class Pair:
    """One decode node's receiver and one prefill node's sender."""

    def __init__(self, transport: str, **settings: float) -> None:
        self.transport = transport
        self.clock = FakeClock()
        self.network = MemoryNetwork()
        self.settings = TransferSettings(transport=transport, peer_timeout=5.0, transfer_timeout=30.0, **settings)
        self.prefill_links, self.decode_links = MemoryLinks(self.network), MemoryLinks(self.network)
        self.prefill_kv = [torch.rand(SHAPE) for _ in range(NUM_LAYERS)]
        self.taker = RecordingTaker()
        self.leases = LeaseTable(self.settings.lease_seconds, self.clock)
        self.sender = self.make_sender()
        self.memory = SharedKVMemory(NUM_LAYERS * LAYER_BYTES) if transport == "shm" else None
        self.decode_kv = self._make_decode_kv()
        self.receiver = KVReceiver(self.hello(), self.settings, lambda: None, self.clock)
        self.receiver.start(self.decode_kv, self.decode_links, ["mem://p0"])
        self.network.pump()

    def make_sender(self, epoch: str = "p-epoch", identity: ModelIdentity = IDENTITY) -> KVSender:
        import os

        who = NodeIdentity(name="p0", epoch=epoch, model=identity, pid=os.getpid())
        sender = KVSender(who, self.settings, self.taker, self.leases, self.clock)
        sender.listen(self.prefill_links, "mem://p0")
        sender.start(self.prefill_kv)
        return sender

    def hello(self, identity: ModelIdentity = IDENTITY) -> PeerHello:
        return PeerHello(
            protocol_version=PROTOCOL_VERSION,
            name="d0",
            epoch="d-epoch",
            model=identity,
            credit_bytes=int(self.settings.credit_bytes),
            wants_digests=self.settings.digest,
            shared_memory=self.memory.offer(NUM_BLOCKS) if self.memory else None,
        )

    def _make_decode_kv(self) -> list[torch.Tensor]:
        if self.memory is None:
            return [torch.full(SHAPE, torch.nan) for _ in range(NUM_LAYERS)]
        whole = torch.frombuffer(self.memory.buffer, dtype=torch.float32).view(NUM_LAYERS, *SHAPE)
        whole.fill_(torch.nan)
        return list(whole)

    def grant(
        self, request_id: str = "r", start: int = 0, end: int = 10, block_ids: tuple[int, ...] = (5, 1, 2)
    ) -> str:
        """Sends a grant and returns its transfer id."""
        grant = Prefill(
            transfer_id=self.receiver.mint_transfer_id(),
            prompt_token_ids=list(range(end)),
            wants_first_token=True,
            sampling=SamplingParams(),
            start=start,
            end=end,
            block_ids=list(block_ids),
        )
        self.receiver.start_load(LoadOrder(request_id=request_id, grant=grant, may_run_early=False))
        self.network.pump()
        return grant.transfer_id

    def hold(self, num_tokens: int = 10) -> Lease:
        return self.leases.hold("held", (0, 3, 4), range(num_tokens), "")

    def pull(self, lease_id: str, start: int = 0, end: int = 10, epoch: str = "p-epoch", salt: str = "") -> str:
        pull = Pull(
            transfer_id=self.receiver.mint_transfer_id(),
            lease_id=lease_id,
            digest=prompt_digest(range(end), salt),
            start=start,
            end=end,
            block_ids=[5, 1, 2],
        )
        order = LoadOrder(request_id="r", grant=pull, candidates=("p0",), epoch=epoch, may_run_early=False)
        self.receiver.start_load(order)
        return pull.transfer_id

    def ship(self, transfer_id: str, *spans: range, block_ids: tuple[int, ...] = (0, 3, 4)) -> None:
        for span in spans:
            for layer in range(NUM_LAYERS):
                self.sender.save(transfer_id, layer, span, block_ids)

    def finish(self, transfer_id: str) -> None:
        self.sender.finish(transfer_id, SampledToken(42, -1.5), num_cached_tokens=4)

    def pump_until_finished(self) -> FinishedLoads:
        everything = FinishedLoads()

        def something() -> bool:
            finished = self.receiver.take_finished()
            everything.received |= finished.received
            everything.failed |= finished.failed
            everything.closed |= finished.closed
            return bool(everything.received or everything.failed or everything.closed)

        self.network.pump_until(something)
        return everything

    def rows(self, caches: list[torch.Tensor], block_ids: tuple[int, ...], span: range) -> torch.Tensor:
        return torch.stack([c[block_ids[p // BLOCK_SIZE], :, p % BLOCK_SIZE] for c in caches for p in span])

    def assert_arrived(self, span: range) -> None:
        assert torch.equal(self.rows(self.decode_kv, (5, 1, 2), span), self.rows(self.prefill_kv, (0, 3, 4), span))
        written = sum(int((~cache.isnan()).sum()) for cache in self.decode_kv)
        assert written * 4 == len(span) * UNIT_BYTES_PER_TOKEN * NUM_LAYERS, "written beyond what was granted"

    def pump_until_shipped(self, num_units: int) -> None:
        self.network.pump_until(lambda: self.sender.counters.num_units >= num_units)
        self.network.pump()

    def close(self) -> None:
        self.sender.close()
        self.network.pump()
        self.receiver.close()
        if self.memory:
            self.memory.close()


@pytest.fixture(params=["zmq", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()
    assert pair.receiver.open_transfers() == []
    assert pair.sender.open_transfer_ids() == []
    assert pair.receiver.num_quarantined == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-to-")]


@pytest.fixture
def messages() -> Iterator[Pair]:
    pair = Pair("zmq")
    yield pair
    pair.close()


def tampering(kind: type, change: Callable[[list[memoryview]], list[list[memoryview]]]):
    """Applies `change` to messages of one kind from the prefill node."""

    def tamper(frames: list[memoryview]) -> list[list[memoryview]]:
        try:
            is_kind = isinstance(decode_from_prefill_node.decode(frames[0]), kind)
        except MalformedMessage:
            is_kind = False
        return change(frames) if is_kind else [frames]

    return tamper


def test_the_handshake_makes_a_pair_ready_over_the_best_transport(pair: Pair):
    assert pair.receiver.ready_peers() == ["p0"]
    assert pair.receiver.peers[0].transport == pair.transport
    assert pair.sender.peer_names == ["d0"]


def test_units_land_in_the_granted_blocks_and_the_first_token_comes_along(pair: Pair):
    transfer_id = pair.grant()
    assert [grant.transfer_id for grant in pair.taker.grants] == [transfer_id]
    pair.ship(transfer_id, range(0, 7), range(7, 10))
    pair.finish(transfer_id)
    finished = pair.pump_until_finished()
    assert finished.received == {"r": LoadResult(first_token=SampledToken(42, -1.5), num_remote_cached_tokens=4)}
    assert not finished.failed
    pair.assert_arrived(range(10))
    assert pair.sender.take_closed() == {transfer_id}
    assert pair.receiver.counters.num_units == pair.sender.counters.num_units == 4
    assert pair.receiver.counters.num_bytes == pair.sender.counters.num_bytes == 10 * UNIT_BYTES_PER_TOKEN * 2
    assert pair.receiver.take_finished() == FinishedLoads(), "each id once"


def test_a_partial_grant_leaves_the_rest_of_the_blocks_alone(pair: Pair):
    transfer_id = pair.grant(start=4, end=9)
    pair.ship(transfer_id, range(4, 9))
    pair.finish(transfer_id)
    assert "r" in pair.pump_until_finished().received
    pair.assert_arrived(range(4, 9))


def test_a_layer_opens_when_its_own_units_are_in(pair: Pair):
    transfer_id = pair.grant()
    pair.sender.save(transfer_id, 0, range(10), (0, 3, 4))
    pair.pump_until_shipped(1)
    pair.receiver.wait_for_layer(0, ["r"])
    opened = threading.Event()
    waiter = threading.Thread(target=lambda: (pair.receiver.wait_for_layer(1, ["r"]), opened.set()))
    waiter.start()
    assert not opened.wait(0.05), "layer 1 has not arrived"
    pair.sender.save(transfer_id, 1, range(10), (0, 3, 4))
    pair.pump_until_shipped(2)
    assert opened.wait(5)
    waiter.join()
    pair.finish(transfer_id)
    assert "r" in pair.pump_until_finished().received


def test_two_transfers_do_not_mix(pair: Pair):
    first, second = pair.grant("r1", block_ids=(5, 1, 2)), pair.grant("r2", block_ids=(0, 6, 7))
    assert first != second
    for transfer_id, source in ((second, (1, 2, 5)), (first, (0, 3, 4))):
        pair.ship(transfer_id, range(10), block_ids=source)
        pair.finish(transfer_id)
    received: dict[str, LoadResult] = {}
    while len(received) < 2:
        received |= pair.pump_until_finished().received
    for target, source in (((5, 1, 2), (0, 3, 4)), ((0, 6, 7), (1, 2, 5))):
        assert torch.equal(pair.rows(pair.decode_kv, target, range(10)), pair.rows(pair.prefill_kv, source, range(10)))


def test_duplicated_and_reordered_units_change_nothing(messages: Pair):
    held: list[list[memoryview]] = []

    def hold_back(frames: list[memoryview]) -> list[list[memoryview]]:
        held.append(frames)
        return [*reversed(held), frames] if len(held) == 4 else []

    messages.network.tamper = tampering(Unit, hold_back)
    transfer_id = messages.grant()
    messages.ship(transfer_id, range(0, 7), range(7, 10))
    messages.pump_until_shipped(4)
    messages.finish(transfer_id)
    assert "r" in messages.pump_until_finished().received
    messages.assert_arrived(range(10))


def test_one_wrong_byte_fails_its_request_and_no_other(messages: Pair):
    flipped: list[int] = []

    def flip(frames: list[memoryview]) -> list[list[memoryview]]:
        if not flipped:
            frames[1][5] ^= 1
            flipped.append(5)
        return [frames]

    bad, good = messages.grant("bad", block_ids=(0, 6, 7)), messages.grant("good")
    messages.network.tamper = tampering(Unit, flip)
    messages.ship(bad, range(10))
    failed = messages.pump_until_finished().failed
    assert failed["bad"].kind is ErrorKind.KV_LOAD_FAILED
    assert failed["bad"].is_fenced
    assert "digest does not match" in failed["bad"].reason
    assert messages.receiver.counters.num_digest_mismatches == 1
    messages.ship(good, range(10))
    messages.finish(good)
    assert "good" in messages.pump_until_finished().received
    messages.network.pump()
    assert messages.taker.aborted == [bad]
    messages.network.pump_until(lambda: bad in messages.sender.take_closed())


def test_without_digests_nothing_is_computed_and_nothing_is_checked():
    pair = Pair("zmq", digest=False)
    flipped, digests = [], []

    def flip(frames: list[memoryview]) -> list[list[memoryview]]:
        unit = decode_from_prefill_node.decode(frames[0])
        digests.append(unit.digest)
        data = bytearray(frames[1])
        data[0] ^= 1
        flipped.append(unit.layer)
        return [[frames[0], memoryview(data)]]

    pair.network.tamper = tampering(Unit, flip)
    transfer_id = pair.grant()
    pair.ship(transfer_id, range(10))
    pair.finish(transfer_id)
    assert pair.pump_until_finished().received.keys() == {"r"}
    assert flipped == list(range(NUM_LAYERS))
    assert set(digests) == {b""}
    pair.close()


def test_units_without_the_digest_that_is_wanted_are_refused(messages: Pair):
    def strip(frames: list[memoryview]) -> list[list[memoryview]]:
        unit = decode_from_prefill_node.decode(frames[0])
        return [[memoryview(encode(replace(unit, digest=b""))), *frames[1:]]]

    messages.network.tamper = tampering(Unit, strip)
    transfer_id = messages.grant()
    messages.ship(transfer_id, range(10))
    messages.finish(transfer_id)
    assert "digest" in messages.pump_until_finished().failed["r"].reason


@pytest.mark.parametrize("named", [(), ("p9", "p8")])
def test_it_is_said_which_nodes_are_not_there(messages: Pair, named: tuple[str, ...]):
    messages.receiver.peers[0].on_down(b"")
    grant = Prefill(
        transfer_id="t", prompt_token_ids=[1], wants_first_token=True, sampling=SamplingParams(), start=0, end=1,
        block_ids=[0],
    )  # fmt: skip
    messages.receiver.start_load(LoadOrder(request_id="r", grant=grant, candidates=named))
    reason = messages.receiver.take_finished().failed["r"].reason
    assert reason == f"{'none of p9, p8' if named else 'no prefill node'} is ready (p0: connection lost)"


def test_a_goodbye_is_heard_at_once_and_is_no_warning(pair: Pair, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    pair.sender.close()
    pair.network.pump()
    assert pair.receiver.ready_peers() == []
    assert pair.receiver.peers[0].reason == "it is shutting down"
    pair.receiver.tick()
    pair.network.pump()
    assert pair.receiver.ready_peers() == [], "who is going down welcomes nobody"
    assert [record.levelname for record in caplog.records if "lost" in record.message] == ["INFO"]


def test_a_decode_node_that_says_goodbye_has_its_prefills_ended(caplog: pytest.LogCaptureFixture):
    pair = Pair("zmq")
    caplog.set_level("INFO")
    transfer_id = pair.grant()
    pair.receiver.close()
    pair.network.pump()
    assert pair.sender.peer_names == []
    assert pair.taker.aborted == [transfer_id]
    pair.network.pump_until(lambda: not pair.sender.open_transfer_ids())
    assert [record.levelname for record in caplog.records if "lost" in record.message] == ["INFO"]
    pair.close()


def test_a_missing_unit_is_not_overlooked(messages: Pair):
    messages.network.tamper = tampering(Unit, lambda frames: [])
    transfer_id = messages.grant()
    messages.ship(transfer_id, range(10))
    messages.finish(transfer_id)
    assert "before it was complete" in messages.pump_until_finished().failed["r"].reason


@pytest.mark.parametrize(
    ("field_name", "value"), [("layer", 9), ("start", 0), ("end", 99), ("num_bytes", 1), ("epoch", "old")]
)
def test_a_unit_that_was_not_granted_is_never_written(messages: Pair, field_name: str, value: object):
    transfer_id = messages.grant(start=4, end=8)

    def forge(frames: list[memoryview]) -> list[list[memoryview]]:
        unit = decode_from_prefill_node.decode(frames[0])
        fields = {name: getattr(unit, name) for name in unit.__struct_fields__} | {field_name: value}
        return [[memoryview(encode(Unit(**fields))), *frames[1:]]]

    messages.network.tamper = tampering(Unit, forge)
    messages.sender.save(transfer_id, 0, range(4, 8), (0, 3, 4))
    messages.pump_until_shipped(1)
    assert all(cache.isnan().all() for cache in messages.decode_kv)
    finished = messages.receiver.take_finished()
    if field_name == "epoch":
        assert messages.receiver.counters.num_late_units == 1
        assert not finished.failed
        messages.receiver.cancel("r")
    else:
        assert finished.failed["r"].kind is ErrorKind.KV_LOAD_FAILED
    messages.network.pump_until(lambda: transfer_id in messages.sender.take_closed())


def test_w15_nothing_is_written_after_a_cancelled_load_was_given_back(pair: Pair):
    transfer_id = pair.grant()
    pair.sender.save(transfer_id, 0, range(10), (0, 3, 4))
    pair.pump_until_shipped(1)
    pair.receiver.cancel("r")
    assert pair.pump_until_finished().closed == {"r"}
    for cache in pair.decode_kv:
        cache.fill_(torch.nan)
    pair.ship(transfer_id, range(10))
    pair.finish(transfer_id)
    pair.network.pump_until(lambda: transfer_id in pair.sender.take_closed())
    pair.network.pump()
    assert all(cache.isnan().all() for cache in pair.decode_kv)
    assert pair.taker.aborted == [transfer_id]
    assert pair.receiver.take_finished() == FinishedLoads()


def test_a_cancel_that_crosses_the_end_is_closed_once(pair: Pair):
    transfer_id = pair.grant()
    pair.ship(transfer_id, range(10))
    pair.finish(transfer_id)
    pair.receiver.cancel("r")
    finished = pair.pump_until_finished()
    assert (finished.closed, finished.received) == ({"r"}, {})
    pair.network.pump_until(lambda: transfer_id in pair.sender.take_closed())
    pair.network.pump()
    assert pair.receiver.take_finished() == FinishedLoads()


def test_without_a_ready_peer_a_load_fails_at_once_and_says_why(messages: Pair):
    messages.prefill_links.close()
    messages.grant()
    failure = messages.receiver.take_finished().failed["r"]
    assert failure.kind is ErrorKind.NO_NODE_READY
    assert "p0: connection lost" in failure.reason


def test_a_lost_connection_fails_what_was_under_way(messages: Pair):
    messages.grant()
    messages.prefill_links.close()
    failure = messages.receiver.take_finished().failed["r"]
    assert (failure.kind, failure.is_fenced) == (ErrorKind.PEER_UNREACHABLE, True)


def test_a_silent_peer_is_lost_and_shared_memory_stays_quarantined_until_it_answers(pair: Pair):
    transfer_id = pair.grant()
    pair.network.tamper = lambda frames: []
    for _ in range(6):
        pair.clock.advance(1.0)
        pair.decode_links.tick()
        pair.network.pump()
    finished = pair.receiver.take_finished()
    assert finished.failed["r"].kind is ErrorKind.PEER_UNREACHABLE
    assert finished.failed["r"].is_fenced == (pair.transport == "zmq")
    assert not finished.closed
    assert pair.receiver.num_quarantined == (pair.transport == "shm")
    pair.network.tamper = lambda frames: [frames]
    pair.decode_links.tick()
    pair.network.pump()
    pair.decode_links.tick()
    if pair.transport == "shm":
        assert pair.pump_until_finished().closed == {"r"}
    pair.network.pump_until(lambda: transfer_id in pair.sender.take_closed())
    assert pair.receiver.ready_peers() == ["p0"]


def test_a_queue_that_moves_is_progress_and_one_that_does_not_is_a_deadline(messages: Pair):
    transfer_id = messages.grant()
    for second in range(100):
        messages.sender.num_steps += second < 50
        messages.clock.advance(1.0)
        messages.decode_links.tick()
        messages.network.pump()
        failed = messages.receiver.take_finished().failed
        if failed:
            break
    assert failed["r"].kind is ErrorKind.DEADLINE_EXCEEDED
    assert 79 <= second <= 81, "50 s of steps and 30 s of patience"
    messages.network.pump_until(lambda: transfer_id in messages.sender.take_closed())


def test_a_restarted_prefill_node_fails_the_old_transfers_and_serves_new_ones(messages: Pair):
    messages.grant("old")
    messages.sender.close()
    messages.prefill_links.close()
    assert messages.receiver.take_finished().failed["old"].kind is ErrorKind.PEER_UNREACHABLE
    messages.prefill_links = MemoryLinks(messages.network)
    messages.sender = messages.make_sender(epoch="p-epoch-2")
    messages.receiver.peers[0].dial(messages.decode_links)
    messages.network.pump()
    transfer_id = messages.grant("new")
    messages.ship(transfer_id, range(10))
    messages.finish(transfer_id)
    assert "new" in messages.pump_until_finished().received


def test_a_new_epoch_without_a_lost_connection_fails_the_old_transfers(messages: Pair):
    messages.grant("old")
    welcome = PeerWelcome(name="p0", epoch="another", transport="zmq", pid=1)
    messages.receiver.peers[0].on_message(b"", [memoryview(encode(welcome))])
    assert "restarted" in messages.receiver.take_finished().failed["old"].reason


def test_a_transfer_that_the_prefill_node_does_not_know_fails(messages: Pair):
    transfer_id = messages.grant()
    pong = PeerPong(sequence=1, num_steps=1, unknown_transfer_ids=[transfer_id])
    messages.receiver.peers[0].on_message(b"", [memoryview(encode(pong))])
    assert "closed the transfer" in messages.receiver.take_finished().failed["r"].reason
    messages.network.pump_until(lambda: transfer_id in messages.sender.take_closed())


def test_a_prefill_that_fails_says_why(pair: Pair):
    transfer_id = pair.grant()
    pair.sender.fail(transfer_id, ErrorKind.INVALID_REQUEST, "too long for me")
    failure = pair.pump_until_finished().failed["r"]
    assert (failure.kind, failure.is_fenced) == (ErrorKind.INVALID_REQUEST, True)
    assert "too long for me" in failure.reason


def test_a_decode_node_that_falls_silent_is_dropped_with_its_requests(messages: Pair):
    transfer_id = messages.grant()
    messages.clock.advance(6.0)
    messages.prefill_links.tick()
    assert messages.taker.aborted == [transfer_id]
    assert messages.sender.peer_names == []
    messages.network.pump_until(lambda: transfer_id in messages.sender.take_closed() or not messages.network.pump())


def test_bytes_under_way_are_bounded_by_credit():
    pair = Pair("zmq", credit_bytes=2 * 5 * UNIT_BYTES_PER_TOKEN)
    transfer_id = pair.grant()
    credits: list[list[memoryview]] = []
    most = 0

    def watch(frames: list[memoryview]) -> list[list[memoryview]]:
        nonlocal most
        most = max(most, pair.sender.counters.num_bytes - pair.receiver.counters.num_bytes)
        credits.append(frames)
        return [frames]

    pair.network.tamper = watch
    pair.ship(transfer_id, range(0, 5), range(5, 10))
    pair.finish(transfer_id)
    assert "r" in pair.pump_until_finished().received
    pair.assert_arrived(range(10))
    assert 0 < most <= pair.settings.credit_bytes
    pair.close()


def test_a_sender_that_waits_for_credit_stops_when_the_transfer_is_cancelled():
    pair = Pair("zmq", credit_bytes=1)
    transfer_id = pair.grant()
    pair.ship(transfer_id, range(0, 5), range(5, 10))
    pair.network.pump_until(lambda: pair.sender.counters.num_units == 1) if not pair.sender.counters.num_units else None
    pair.receiver.cancel("r")
    pair.network.pump_until(lambda: transfer_id in pair.sender.take_closed())
    pair.close()


@pytest.mark.parametrize(
    ("field_name", "value", "says"),
    [
        ("dtype", "bfloat16", "dtype is float32 here and bfloat16 there"),
        ("block_size", 8, "block_size is 4 here and 8 there"),
        ("num_layers", 3, "and 3 there"),
        ("weights_digest", "x", "the weights differ"),
        ("config_digest", "x", "the config differs"),
    ],
)
def test_another_model_is_refused_at_the_handshake_with_the_reason(field_name: str, value: object, says: str):
    pair = Pair("zmq")
    fields = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__} | {field_name: value}
    other = KVReceiver(pair.hello(ModelIdentity(**fields)), pair.settings, lambda: None, pair.clock)
    other.start(pair.decode_kv, pair.decode_links, ["mem://p0"])
    pair.network.pump()
    assert other.ready_peers() == []
    assert says in other.peers[0].reason
    assert pair.sender.num_refused == 1
    other.close()
    pair.close()


def test_shared_memory_that_is_not_reachable_falls_back_or_is_refused():
    for transport, expected in (("auto", "zmq"), ("shm", None)):
        pair = Pair(transport)
        other = PeerHello(
            protocol_version=PROTOCOL_VERSION,
            name="d1",
            epoch="d1-epoch",
            model=IDENTITY,
            credit_bytes=1 << 20,
            shared_memory=SharedKVMemory(64).offer(NUM_BLOCKS),
        )
        receiver = KVReceiver(other, pair.settings, lambda: None, pair.clock)
        receiver.start(pair.decode_kv, pair.decode_links, ["mem://p0"])
        pair.network.pump()
        assert receiver.peers[0].transport == (expected or "zmq")
        assert bool(receiver.ready_peers()) == (expected is not None)
        receiver.close()
        pair.close()


def test_garbage_is_counted_and_dropped(messages: Pair):
    for garbage in (b"", b"\x00" * 40, b"\x80\x04pickle", encode(CancelTransfer(transfer_id="x")) + b"tail"):
        messages.sender.on_message(b"peer-1", [memoryview(garbage)])
        messages.receiver.peers[0].on_message(b"", [memoryview(garbage)])
    messages.sender.on_message(b"peer-1", [])
    assert messages.sender.num_malformed == 5
    assert messages.receiver.peers[0].num_malformed == 4
    assert messages.receiver.ready_peers() == ["p0"]


def test_late_words_about_unknown_transfers_are_counted(messages: Pair):
    for message in (
        PrefillDone(transfer_id="gone", epoch="p-epoch", computed_at=0.0),
        FirstToken(transfer_id="gone", epoch="p-epoch", token=None, num_cached_tokens=0),
        TransferClosed(transfer_id="gone", epoch="p-epoch"),
    ):
        messages.receiver.peers[0].on_message(b"", [memoryview(encode(message))])
    assert messages.receiver.counters.num_late_units == 2
    assert messages.receiver.take_finished() == FinishedLoads()


def test_held_kv_is_pulled_and_its_lease_given_back(pair: Pair):
    lease = pair.hold()
    pair.pull(lease.lease_id, start=4, end=9)
    assert pair.pump_until_finished().received == {"r": LoadResult()}
    pair.assert_arrived(range(4, 9))
    assert pair.leases.take_over() == {"held"}
    assert (len(pair.leases), pair.leases.counters.num_read) == (0, 1)
    assert pair.sender.take_closed() == frozenset(), "a read is no request of the engine's"


@pytest.mark.parametrize(
    ("pull", "reason"),
    [
        ({"lease_id": "unknown"}, "unknown or has expired"),
        ({"end": 11}, "11 tokens asked for, 10 are held"),
        ({"salt": "other"}, "another prompt's"),
    ],
)
def test_a_pull_of_what_is_not_held_fails_with_the_reason(pair: Pair, pull: dict[str, object], reason: str):
    lease = pair.hold()
    pair.pull(**({"lease_id": lease.lease_id} | pull))
    assert reason in pair.pump_until_finished().failed["r"].reason
    assert all(cache.isnan().all() for cache in pair.decode_kv)
    assert pair.leases.counters.num_refused_reads == 1
    pair.sender.release_lease(lease.lease_id)
    assert pair.leases.take_over() == {"held"}


def test_a_pull_from_an_earlier_life_of_the_holder_fails_at_once(messages: Pair):
    messages.pull(messages.hold().lease_id, epoch="an-earlier-epoch")
    failure = messages.receiver.take_finished().failed["r"]
    assert failure.kind is ErrorKind.KV_LOAD_FAILED
    assert "not there in the same epoch" in failure.reason


def test_a_read_that_outlives_its_lease_fails():
    """The sender waits for credit that comes only after the deadline."""
    pair = Pair("zmq", credit_bytes=1)
    lease = pair.hold()
    pair.network.tamper = tampering(Unit, lambda frames: [])
    pair.pull(lease.lease_id)
    pair.pump_until_shipped(1)
    pair.clock.advance(31.0)
    pair.leases.expire()
    assert pair.leases.take_over() == frozenset(), "somebody reads it"
    pair.network.tamper = lambda frames: [frames]
    pair.sender.on_message(b"peer-1", [memoryview(encode(Credit(num_bytes=1 << 20)))])
    pair.sender.on_message(b"peer-1", [memoryview(encode(Credit(num_bytes=1 << 20)))])
    assert "while it was read" in pair.pump_until_finished().failed["r"].reason
    assert pair.leases.take_over() == {"held"}
    assert pair.leases.counters.num_fenced_reads == 1
    pair.close()


def test_a_waiting_request_keeps_the_lease_alive_by_its_heartbeats(messages: Pair):
    lease = messages.hold()
    messages.receiver.await_lease(PullKV("p0", "p-epoch", lease.lease_id, 10))
    for _ in range(100):
        messages.clock.advance(1.0)
        messages.decode_links.tick()
        messages.prefill_links.tick()
        messages.network.pump()
    assert len(messages.leases) == 1
    messages.receiver.release(PullKV("p0", "p-epoch", lease.lease_id, 10))
    messages.network.pump()
    assert (len(messages.leases), messages.leases.counters.num_released) == (0, 1)
