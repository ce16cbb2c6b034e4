"""Takes units into the decode node's own blocks: checked first, then written."""

from collections.abc import Sequence

import torch
import xxhash

from connector.incoming_transfer import IncomingTransfer
from connector.kv_unit import scatter_unit, unit_num_bytes
from connector.loads import ReceiverCounters
from connector.peer_messages import Unit


class KVIntake:
    """`kv_caches`: one tensor per layer, as registered with the connector."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], counters: ReceiverCounters, *, checks_digests: bool) -> None:
        self._kv_caches = kv_caches
        self._counters = counters
        self._checks_digests = checks_digests

    @property
    def num_layers(self) -> int:
        return len(self._kv_caches)

    def take(self, transfer: IncomingTransfer, unit: Unit, payload: Sequence[memoryview], now: float) -> str | None:
        """What is wrong with the unit, of which then nothing was written; None if it is in.

        Without a payload the writer has put it into the blocks already, through shared memory.
        """
        problem = self.check(transfer, unit, payload)
        if problem is not None:
            return problem
        if payload:
            data = torch.frombuffer(payload[0], dtype=torch.uint8)
            scatter_unit(self._kv_caches[unit.layer], transfer.block_ids, unit.start, unit.end, data)
        transfer.add(unit.layer, unit.start, unit.end, now)
        transfer.count(unit.num_bytes, now)
        self._counters.num_units += 1
        self._counters.num_bytes += unit.num_bytes
        return None

    def check(self, transfer: IncomingTransfer, unit: Unit, payload: Sequence[memoryview]) -> str | None:
        """What is wrong with it, or None."""
        if not transfer.fits(unit.layer, unit.start, unit.end):
            return "outside of what was granted"
        expected = unit_num_bytes(self._kv_caches[unit.layer], unit.start, unit.end)
        if unit.num_bytes != expected or (payload and payload[0].nbytes != expected):
            return f"{payload[0].nbytes if payload else unit.num_bytes} bytes instead of {expected}"
        if payload and self._checks_digests and xxhash.xxh3_64_digest(payload[0]) != unit.digest:
            self._counters.num_digest_mismatches += 1
            return "the digest does not match"
        return None
