"""What requests do with blocks: find a cached prefix, take a whole block table, grow by one, publish, give back."""

from collections.abc import Sequence
from itertools import islice

from engine.block_hash import extend_block_hashes, root_hash
from engine.block_pool import BlockPool
from engine.config import CacheConfig
from engine.request import Request


class BlockManager:
    """Keeps `request.block_ids` and `request.block_hashes`.

    positions: 0 ........... num_computed_tokens ........ len(block_ids) * block_size
               | may be published, block by block |  reserved  |
    """

    def __init__(self, pool: BlockPool, cache: CacheConfig, model_digest: str) -> None:
        self.block_size = cache.block_size
        self._pool = pool
        self._model_digest = model_digest
        self._is_prefix_caching = cache.enable_prefix_caching

    def find_local_hit(self, request: Request) -> list[int]:
        """The cached blocks that its tokens begin with. At least one token is left to compute, for its logits; all of
        them where it lacks logprobs of its prompt."""
        if not self._is_prefix_caching or request.lacks_prompt_logprobs:
            return []
        self._extend_hashes(request)
        return self._pool.find_longest_cached_prefix(
            islice(request.block_hashes, (request.num_tokens - 1) // self.block_size)
        )

    def allocate(self, request: Request, hit: Sequence[int], num_reserved: int) -> bool:
        """The hit and new blocks for all of the request's known tokens, leaving `num_reserved` free; or nothing."""
        num_new = -(-request.num_tokens // self.block_size) - len(hit)
        if num_new + num_reserved > self._pool.num_free - self._pool.count_free(hit):
            return False
        self._pool.acquire(hit)
        request.block_ids = [*hit, *self._pool.allocate(num_new)]
        return True

    def covers_all_tokens(self, request: Request) -> bool:
        return len(request.token_ids) <= len(request.block_ids) * self.block_size

    def grow(self, request: Request) -> None:
        """One more block, for the token made last; the pool must have one."""
        request.block_ids += self._pool.allocate(1)

    def publish(self, request: Request, first_block: int) -> None:
        """Lets other requests find the blocks from `first_block` on that are full and computed."""
        end = request.num_computed_tokens // self.block_size
        if first_block >= end or not self._is_prefix_caching:
            return
        self._extend_hashes(request)
        self._pool.cache_full_blocks(request.block_ids[first_block:end], request.block_hashes[first_block:end])

    def forget(self, request: Request, start: int) -> None:
        """What the request's blocks hold from position `start` on cannot be trusted."""
        self._pool.forget(request.block_ids[start // self.block_size :])

    def release(self, request: Request) -> None:
        """Drops the request's references; what a transfer pins stays out of reach."""
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

    def _extend_hashes(self, request: Request) -> None:
        root = b"" if request.block_hashes else root_hash(self._model_digest, request.cache_salt)
        extend_block_hashes(request.block_hashes, root, request.token_ids, self.block_size)
