"""The block pool: which KV blocks are free, referenced, pinned, and what the full ones contain. Ids and counts only.

                 allocate, acquire                        free (last reference)
        FREE ------------------------> REFERENCED ------------------------------> FREE   if nothing pins it
         ^                                  |
         |            unpin                 | free, while a transfer may still read or write it
         +---------------------------- PINNED ONLY

A block keeps its content hash on the free list, so that it can be found again, until it is reused for something else.
The free list is in the order of reuse: blocks without a hash first, then the least recently freed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import or_

from engine.errors import PoolCorrupted


class BlockPool:
    """Every method is O(1) per block. Callers check `num_free` before they allocate."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_refs = [0] * num_blocks
        self._num_pins = [0] * num_blocks
        self._pinned_by: dict[str, tuple[int, ...]] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find, free or not."""
        return len(self._block_of)

    @property
    def num_held(self) -> int:
        """Blocks that requests refer to. O(num_blocks)."""
        return self.num_blocks - self._num_refs.count(0)

    @property
    def num_pinned(self) -> int:
        """Blocks that transfers may still read or write. O(num_blocks)."""
        return self.num_blocks - self._num_pins.count(0)

    # References

    def allocate(self, num_blocks: int) -> list[int]:
        """That many free blocks with one reference each, or none at all and a ValueError."""
        if num_blocks > len(self._free):
            raise ValueError(f"asked for {num_blocks} blocks, {len(self._free)} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._drop_hash(block_id)
            self._num_refs[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these cached blocks."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives up one reference to each block. Last block first, so that a prefix is evicted from its tail."""
        for block_id in reversed(block_ids):
            if self._num_refs[block_id] == 0:
                raise PoolCorrupted(f"block {block_id} freed more often than referenced")
            self._num_refs[block_id] -= 1
            self._retire_if_unused(block_id)

    # Transfer pins

    def pin(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Keeps the blocks from reuse until `unpin`, whatever happens to their references. One pin set per id."""
        if request_id in self._pinned_by:
            raise PoolCorrupted(f"request {request_id} pins blocks already")
        self._pinned_by[request_id] = tuple(block_ids)
        for block_id in block_ids:
            self._num_pins[block_id] += 1

    def unpin(self, request_id: str) -> bool:
        """Ends the pin. False if there was none."""
        block_ids = self._pinned_by.pop(request_id, None)
        if block_ids is None:
            return False
        for block_id in reversed(block_ids):
            self._num_pins[block_id] -= 1
            self._retire_if_unused(block_id)
        return True

    def is_pinned(self, request_id: str) -> bool:
        return request_id in self._pinned_by

    # Prefix index

    def cache_full_blocks(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """The blocks hold what the hashes say and may be found from now on. The first writer of a hash wins."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if self._hash_of[block_id] is None and self._block_of.setdefault(block_hash, block_id) == block_id:
                self._hash_of[block_id] = block_hash

    def find_longest_cached_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the leading hashes that are cached. Takes no reference."""
        found = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free: acquiring them leaves that many fewer to allocate."""
        return sum(block_id in self._free for block_id in block_ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """The blocks' content cannot be trusted: nobody finds them any more."""
        for block_id in block_ids:
            self._drop_hash(block_id)

    def reset_prefix_cache(self) -> None:
        """Nothing is found any more; references and pins stay."""
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    # Self-check

    def check(self) -> None:
        """Raises `PoolCorrupted` unless each block is in exactly one place and the index is one to one."""
        self._check_that(min(self._num_refs) >= 0, "a reference count is negative")
        self._check_that(min(self._num_pins) >= 0, "a pin count is negative")
        in_use = list(map(or_, self._num_refs, self._num_pins))
        self._check_that(not any(map(in_use.__getitem__, self._free)), "a free block is referenced or pinned")
        self._check_that(in_use.count(0) == len(self._free), "a block is neither free nor referenced nor pinned")
        num_pins = sum(map(len, self._pinned_by.values()))
        self._check_that(num_pins == sum(self._num_pins), "the pin counts are not those of the pinning requests")
        index = {block_hash: i for i, block_hash in enumerate(self._hash_of) if block_hash is not None}
        self._check_that(index == self._block_of, "the prefix index and the blocks' hashes differ")
        self._check_that(len(index) == self.num_blocks - self._hash_of.count(None), "two blocks share a hash")

    def _check_that(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise PoolCorrupted(
                f"{otherwise} (blocks {self.num_blocks}, free {self.num_free}, held {self.num_held}, "
                f"pinned {self.num_pinned}, cached {self.num_cached})"
            )

    def _retire_if_unused(self, block_id: int) -> None:
        if self._num_refs[block_id] or self._num_pins[block_id]:
            return
        self._free[block_id] = None
        if self._hash_of[block_id] is None:
            self._free.move_to_end(block_id, last=False)

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None
