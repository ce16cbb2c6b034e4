from collections.abc import Iterator

import pytest

from engine.block_pool import BlockPool
from engine.errors import PoolCorrupted

A, B, C, D = (bytes([i]) * 32 for i in range(4))


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8)
    yield pool
    pool.check()


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_free, pool.num_held, pool.num_pinned, pool.num_cached


def test_a_new_pool_is_free(pool: BlockPool) -> None:
    assert counts(pool) == (8, 0, 0, 0)


def test_allocation_is_all_or_nothing(pool: BlockPool) -> None:
    first = pool.allocate(5)
    assert len(set(first)) == 5
    with pytest.raises(ValueError, match="asked for 4 blocks, 3 are free"):
        pool.allocate(4)
    assert counts(pool) == (3, 5, 0, 0)
    assert pool.allocate(0) == []
    assert not set(first) & set(pool.allocate(3))


def test_freed_blocks_can_be_allocated_again(pool: BlockPool) -> None:
    pool.free(pool.allocate(8))
    assert sorted(pool.allocate(8)) == list(range(8))


def test_a_shared_block_is_free_after_the_last_reference(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    pool.cache_full_blocks(block_ids, [A, B])
    pool.acquire(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 6
    pool.free(block_ids)
    assert pool.num_free == 8


def test_a_block_freed_twice_is_a_bug(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(PoolCorrupted, match="freed more often"):
        pool.free(block_ids)


def test_free_cached_blocks_are_found_and_revived(pool: BlockPool) -> None:
    block_ids = pool.allocate(3)
    pool.cache_full_blocks(block_ids, [A, B, C])
    pool.free(block_ids)
    assert pool.find_longest_cached_prefix([A, B, D, C]) == block_ids[:2]
    assert pool.count_free(block_ids[:2]) == 2
    pool.acquire(block_ids[:2])
    assert counts(pool) == (6, 2, 0, 3)
    assert pool.count_free(block_ids) == 1


def test_a_prefix_ends_at_the_first_gap(pool: BlockPool) -> None:
    block_ids = pool.allocate(3)
    pool.cache_full_blocks(block_ids[1:], [B, C])
    assert pool.find_longest_cached_prefix([A, B, C]) == []


def test_blocks_without_content_are_reused_first(pool: BlockPool) -> None:
    cached, plain = pool.allocate(2), pool.allocate(6)
    pool.cache_full_blocks(cached, [A, B])
    pool.free(cached)
    pool.free(plain)
    assert sorted(pool.allocate(6)) == sorted(plain)
    assert pool.num_cached == 2


def test_a_prefix_is_evicted_from_its_tail(pool: BlockPool) -> None:
    block_ids = pool.allocate(8)
    pool.cache_full_blocks(block_ids[:4], [A, B, C, D])
    pool.free(block_ids)
    pool.allocate(5)
    assert pool.find_longest_cached_prefix([A, B, C, D]) == block_ids[:3]
    pool.allocate(2)
    assert pool.find_longest_cached_prefix([A, B, C, D]) == block_ids[:1]


def test_the_least_recently_freed_prefix_is_evicted_first(pool: BlockPool) -> None:
    old, new = pool.allocate(4), pool.allocate(4)
    pool.cache_full_blocks(old[:1], [A])
    pool.cache_full_blocks(new[:1], [B])
    pool.free(old)
    pool.free(new)
    pool.allocate(7)
    assert pool.find_longest_cached_prefix([A]) == []
    assert pool.find_longest_cached_prefix([B]) == new[:1]


def test_the_first_writer_of_a_hash_wins(pool: BlockPool) -> None:
    first, second = pool.allocate(1), pool.allocate(1)
    pool.cache_full_blocks(first, [A])
    pool.cache_full_blocks(second, [A])
    assert pool.find_longest_cached_prefix([A]) == first
    assert pool.num_cached == 1
    pool.free(second)
    assert pool.find_longest_cached_prefix([A]) == first


def test_caching_a_block_again_changes_nothing(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    pool.cache_full_blocks(block_ids[:1], [A])
    pool.cache_full_blocks(block_ids, [A, B])
    assert pool.find_longest_cached_prefix([A, B]) == block_ids


def test_forgotten_blocks_are_not_found(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    pool.cache_full_blocks(block_ids, [A, B])
    pool.forget(block_ids[1:])
    pool.forget(block_ids[1:])
    assert pool.find_longest_cached_prefix([A, B]) == block_ids[:1]


def test_reset_forgets_all_but_takes_nothing_away(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    pool.cache_full_blocks(block_ids, [A, B])
    pool.pin("r", block_ids)
    pool.reset_prefix_cache()
    assert counts(pool) == (6, 2, 2, 0)
    pool.unpin("r")
    pool.free(block_ids)


def test_a_pinned_block_is_not_reused_until_unpinned(pool: BlockPool) -> None:
    block_ids = pool.allocate(3)
    pool.pin("r", block_ids)
    pool.free(block_ids)
    assert counts(pool) == (5, 0, 3, 0)
    assert not set(pool.allocate(5)) & set(block_ids)
    assert pool.unpin("r")
    assert sorted(pool.allocate(3)) == sorted(block_ids)


def test_unpinning_a_referenced_block_leaves_it_referenced(pool: BlockPool) -> None:
    block_ids = pool.allocate(3)
    pool.pin("r", block_ids)
    assert pool.unpin("r")
    assert counts(pool) == (5, 3, 0, 0)


def test_two_pins_on_a_shared_block_end_one_by_one(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.pin("a", block_ids)
    pool.pin("b", block_ids)
    pool.free(block_ids)
    pool.unpin("a")
    assert pool.num_free == 7
    pool.unpin("b")
    assert pool.num_free == 8


def test_a_pinned_cached_block_can_be_acquired(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.cache_full_blocks(block_ids, [A])
    pool.pin("a", block_ids)
    pool.free(block_ids)
    assert pool.count_free(block_ids) == 0
    pool.acquire(pool.find_longest_cached_prefix([A]))
    pool.unpin("a")
    assert counts(pool) == (7, 1, 0, 1)


def test_unknown_unpin_is_harmless_and_double_pin_a_bug(pool: BlockPool) -> None:
    assert not pool.unpin("nobody")
    pool.pin("r", pool.allocate(1))
    assert pool.is_pinned("r")
    with pytest.raises(PoolCorrupted, match="pins blocks already"):
        pool.pin("r", [])


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda p: p._free.pop(7), "neither free nor"),
        (lambda p: p._free.__setitem__(p.allocate(1)[0], None), "free block is referenced"),
        (lambda p: p._num_refs.__setitem__(0, -1), "reference count is negative"),
        (lambda p: p._num_pins.__setitem__(0, -1), "pin count is negative"),
        (lambda p: (p.pin("r", p.allocate(1)), p._pinned_by.clear()), "pin counts"),
        (lambda p: p._block_of.__setitem__(A, 3), "prefix index"),
        (lambda p: (p._block_of.__setitem__(A, 1), p._hash_of.__setitem__(slice(0, 2), [A, A])), "share a hash"),
    ],
)
def test_check_finds_damage(damage, finding: str) -> None:
    pool = BlockPool(8)
    damage(pool)
    with pytest.raises(PoolCorrupted, match=finding):
        pool.check()
