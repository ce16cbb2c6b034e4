"""Poison: blocks that hold nothing hold NaN. What was never written, or is read after it was given up, shows."""

import math
from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.engine import Engine


class Poison:
    """Fills the KV of one engine's blocks when they are handed out, and when they become free without being cached."""

    def __init__(self, engine: Engine) -> None:
        self._pool: BlockPool = engine.scheduler.pool
        self._layers = engine.worker._kv_cache.layers
        self.num_poisoned = 0
        self._fill(range(self._pool.num_blocks))
        self._wrap_allocate()
        self._wrap_retire()
        self._wrap_drop_hash()

    def _wrap_allocate(self) -> None:
        allocate = self._pool.allocate

        def poisoned(num_blocks: int) -> list[int]:
            block_ids = allocate(num_blocks)
            self._fill(block_ids)
            return block_ids

        self._pool.allocate = poisoned

    def _wrap_retire(self) -> None:
        retire = self._pool._retire_if_unused

        def poisoned(block_id: int) -> None:
            retire(block_id)
            self._fill_if_empty(block_id)

        self._pool._retire_if_unused = poisoned

    def _wrap_drop_hash(self) -> None:
        drop_hash = self._pool._drop_hash

        def poisoned(block_id: int) -> None:
            drop_hash(block_id)
            self._fill_if_empty(block_id)

        self._pool._drop_hash = poisoned

    def _fill_if_empty(self, block_id: int) -> None:
        if block_id in self._pool._free and self._pool._hash_of[block_id] is None:
            self._fill([block_id])

    def _fill(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        for layer in self._layers:
            layer[block_ids] = math.nan
        self.num_poisoned += len(block_ids)
