"""Which requests have KV under way, and the pins that keep their blocks meanwhile.

  load   a transfer writes into the request's blocks; over when received
  ship   a transfer reads them; over when sent

An entry outlives its request: an aborted request's blocks are pinned until the transfer is over. A request that loads
from one place and ships to another has both, and one pin that ends with the later of the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Load:
    """KV of the positions `[start, start + num_tokens)` is on its way."""

    start: int
    num_tokens: int


class OpenTransfers:
    """By request id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._loads: dict[str, Load] = {}
        self._ships: set[str] = set()
        self._abandoned: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads.keys() | self._ships | self._abandoned)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads.keys() | self._ships | self._abandoned)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads or request_id in self._ships or request_id in self._abandoned

    def find_load(self, request_id: str) -> Load | None:
        return self._loads.get(request_id)

    def begin_load(self, request_id: str, load: Load, block_ids: Sequence[int]) -> None:
        self._pin(request_id, block_ids)
        self._loads[request_id] = load

    def begin_ship(self, request_id: str, block_ids: Sequence[int]) -> None:
        self._pin(request_id, block_ids)
        self._ships.add(request_id)

    def end_load(self, request_id: str) -> bool:
        """False if none was open."""
        was_open = self._loads.pop(request_id, None) is not None
        self._unpin_if_over(request_id)
        return was_open

    def abandon_load(self, request_id: str) -> None:
        """The load failed, but its writer may still reach the blocks: the pin stays until `end_abandoned`."""
        if self._loads.pop(request_id, None) is not None:
            self._abandoned.add(request_id)

    def end_abandoned(self, request_id: str) -> bool:
        """False if none was."""
        was_abandoned = request_id in self._abandoned
        self._abandoned.discard(request_id)
        self._unpin_if_over(request_id)
        return was_abandoned

    def end_ship(self, request_id: str) -> bool:
        """False if none was open."""
        was_open = request_id in self._ships
        self._ships.discard(request_id)
        self._unpin_if_over(request_id)
        return was_open

    def end_all(self, request_id: str) -> bool:
        """False if neither was open."""
        had_load, had_ship = self.end_load(request_id), self.end_ship(request_id)
        return had_load or had_ship

    def _pin(self, request_id: str, block_ids: Sequence[int]) -> None:
        if not self._pool.is_pinned(request_id):
            self._pool.pin(request_id, block_ids)

    def _unpin_if_over(self, request_id: str) -> None:
        if request_id not in self:
            self._pool.unpin(request_id)
