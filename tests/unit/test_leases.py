import pytest

from connector.leases import LeaseError, LeaseTable, prompt_digest
from tests.builders import FakeClock

TOKENS = list(range(20))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> LeaseTable:
    return LeaseTable(30.0, clock)


def hold(table: LeaseTable):
    return table.hold("r", (1, 2), TOKENS, "salt")


def read(table: LeaseTable, lease_id: str, num_tokens: int = 20):
    return table.start_read(lease_id, num_tokens, prompt_digest(TOKENS[:num_tokens], "salt"))


def test_w14_a_lease_is_freed_once_its_deadline_passes_and_never_earlier(table: LeaseTable, clock: FakeClock):
    lease = hold(table)
    for _ in range(5):  # heartbeats
        clock.advance(29.0)
        table.expire()
        assert table.take_over() == frozenset()
        table.renew([lease.lease_id])
    clock.advance(30.0)  # silence, up to the deadline
    table.expire()
    assert table.take_over() == frozenset()
    clock.advance(0.001)
    table.expire()
    assert table.take_over() == {"r"}
    with pytest.raises(LeaseError, match="expired"):
        read(table, lease.lease_id)
    assert (table.counters.num_renewed, table.counters.num_expired, table.counters.num_refused_reads) == (5, 1, 1)


def test_an_expired_lease_cannot_be_renewed_or_read_before_the_sweep(table: LeaseTable, clock: FakeClock):
    lease = hold(table)
    clock.advance(30.1)
    table.renew([lease.lease_id])
    with pytest.raises(LeaseError, match="expired"):
        read(table, lease.lease_id)


def test_a_read_in_time_gives_the_lease_back(table: LeaseTable):
    lease = read(table, hold(table).lease_id)
    assert table.take_over() == frozenset()
    table.end_read(lease, was_read=True)
    assert table.take_over() == {"r"}
    assert table.take_over() == frozenset(), "each id once"
    assert table.counters.num_read == 1


def test_a_late_read_fails_and_its_blocks_were_pinned_meanwhile(table: LeaseTable, clock: FakeClock):
    lease = read(table, hold(table).lease_id)
    clock.advance(31.0)
    table.expire()
    assert table.take_over() == frozenset(), "somebody reads it"
    with pytest.raises(LeaseError, match="while it was read"):
        table.end_read(lease, was_read=True)
    assert table.take_over() == {"r"}
    assert (table.counters.num_fenced_reads, table.counters.num_read) == (1, 0)


def test_a_read_that_was_broken_off_leaves_the_lease_for_another_try(table: LeaseTable):
    lease = hold(table)
    table.end_read(read(table, lease.lease_id), was_read=False)
    assert table.take_over() == frozenset()
    table.end_read(read(table, lease.lease_id), was_read=True)
    assert table.take_over() == {"r"}


def test_release_frees_at_once_or_with_the_end_of_the_read(table: LeaseTable):
    table.release(hold(table).lease_id)
    assert table.take_over() == {"r"}
    lease = read(table, hold(table).lease_id)
    table.release(lease.lease_id)
    table.release(lease.lease_id)
    assert table.take_over() == frozenset()
    table.end_read(lease, was_read=False)
    assert table.take_over() == {"r"}
    assert table.counters.num_released == 2
    table.release("unknown")


@pytest.mark.parametrize(
    ("num_tokens", "digest", "says"),
    [
        (21, prompt_digest([*TOKENS, 20], "salt"), "21 tokens asked for, 20 are held"),
        (20, prompt_digest(TOKENS, "pepper"), "another prompt"),
        (12, prompt_digest([*TOKENS[:11], 99], "salt"), "another prompt"),
    ],
)
def test_only_the_very_prompt_may_be_read(table: LeaseTable, num_tokens: int, digest: bytes, says: str):
    lease = hold(table)
    with pytest.raises(LeaseError, match=says):
        table.start_read(lease.lease_id, num_tokens, digest)
    assert lease.num_readers == 0


def test_a_part_of_the_prompt_may_be_read(table: LeaseTable):
    lease = read(table, hold(table).lease_id, num_tokens=12)
    table.end_read(lease, was_read=True)


def test_salt_and_tokens_cannot_be_traded_for_each_other():
    assert prompt_digest([1], "a") != prompt_digest([1], "b")
    assert len({prompt_digest([1, 2], ""), prompt_digest([1], "2"), prompt_digest([12], "")}) == 3
