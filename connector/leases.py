"""KV that is kept for somebody who has not come yet.

  hold --> LIVE --start_read--> READ --end_read--> over         or, where the deadline passed meanwhile, a failed read
            | ^-- renewed by heartbeats
            +--- release: the second leg will not come --> over
            +--- the deadline has passed: expired -------> over

A lease's deadline stands on the holder's monotonic clock. It is looked at when a read starts and again when it ends: a
late read fails, it never delivers KV that may be somebody else's by now. While a read goes on, the blocks stay pinned
whatever the clock says.
"""

import hashlib
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import PdserveError


class LeaseError(PdserveError):
    """The held KV is not to be had: unknown, expired, or another prompt's."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """Held KV of `token_ids`, the leading positions of one finished request."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    cache_salt: str
    deadline: float
    num_readers: int = 0
    has_ended: bool = False
    """Nobody may start to read it any more."""


@dataclass(slots=True)
class LeaseCounters:
    """Only ever grow."""

    num_granted: int = 0
    num_renewed: int = 0
    num_expired: int = 0
    num_read: int = 0
    num_released: int = 0
    """Given back unread."""
    num_refused_reads: int = 0
    """Reads of unknown or expired leases, and of another prompt."""
    num_fenced_reads: int = 0
    """Reads that had begun in time and ended too late."""


@dataclass(slots=True)
class _Table:
    leases: dict[str, Lease] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)


class LeaseTable:
    """All leases of one holder. Called from the engine's, the link's and the peers' threads."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = LeaseCounters()
        self.seconds = seconds
        self._clock = clock
        self._table = _Table()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table.leases)

    def hold(self, request_id: str, block_ids: Sequence[int], token_ids: Sequence[int], cache_salt: str) -> Lease:
        """A new lease on the KV of `token_ids`, which is in `block_ids`. The blocks are the caller's to pin."""
        lease = Lease(
            lease_id=secrets.token_hex(16),
            request_id=request_id,
            block_ids=tuple(block_ids),
            token_ids=tuple(token_ids),
            cache_salt=cache_salt,
            deadline=self._clock() + self.seconds,
        )
        with self._lock:
            self._table.leases[lease.lease_id] = lease
            self.counters.num_granted += 1
        return lease

    def renew(self, lease_ids: Sequence[str]) -> None:
        """Puts the deadlines off. Unknown and expired ones are passed over."""
        with self._lock:
            now = self._clock()
            for lease_id in lease_ids:
                lease = self._table.leases.get(lease_id)
                if lease is not None and now <= lease.deadline:
                    lease.deadline = now + self.seconds
                    self.counters.num_renewed += 1

    def start_read(self, lease_id: str, num_tokens: int, digest: bytes) -> Lease:
        """The lease, for reading its leading `num_tokens` positions. Raises `LeaseError`."""
        with self._lock:
            lease = self._table.leases.get(lease_id)
            try:
                return self._open_read(lease, num_tokens, digest)
            except LeaseError:
                self.counters.num_refused_reads += 1
                raise

    def end_read(self, lease: Lease, *, was_read: bool) -> None:
        """The read is over; a complete one gives the lease back. Raises `LeaseError` if it came too late."""
        with self._lock:
            lease.num_readers -= 1
            is_late = was_read and (lease.has_ended or self._clock() > lease.deadline)
            if was_read and not is_late:
                lease.has_ended = True
                self.counters.num_read += 1
            self._free_if_over(lease)
            if is_late:
                self.counters.num_fenced_reads += 1
                raise LeaseError("the lease ended while it was read")

    def release(self, lease_id: str) -> None:
        """Nobody will read it. Unknown ids are passed over: it may have expired."""
        with self._lock:
            lease = self._table.leases.get(lease_id)
            if lease is not None and not lease.has_ended:
                lease.has_ended = True
                self.counters.num_released += 1
                self._free_if_over(lease)

    def expire(self) -> None:
        """Ends the leases whose deadline has passed; those being read end with their read."""
        with self._lock:
            now = self._clock()
            late = [lease for lease in self._table.leases.values() if now > lease.deadline and not lease.has_ended]
            for lease in late:
                lease.has_ended = True
                self.counters.num_expired += 1
                self._free_if_over(lease)

    def has_news(self) -> bool:
        return bool(self._table.over)

    def take_over(self) -> frozenset[str]:
        """Request ids whose blocks nobody holds any more; each once."""
        with self._lock:
            over, self._table.over = self._table.over, set()
            return frozenset(over)

    def _open_read(self, lease: Lease | None, num_tokens: int, digest: bytes) -> Lease:
        if lease is None or lease.has_ended or self._clock() > lease.deadline:
            raise LeaseError("the lease is unknown or has expired")
        if num_tokens > len(lease.token_ids):
            raise LeaseError(f"{num_tokens} tokens asked for, {len(lease.token_ids)} are held")
        if digest != prompt_digest(lease.token_ids[:num_tokens], lease.cache_salt):
            raise LeaseError("what is held is another prompt's")
        lease.num_readers += 1
        return lease

    def _free_if_over(self, lease: Lease) -> None:
        if lease.has_ended and lease.num_readers == 0 and self._table.leases.pop(lease.lease_id, None) is not None:
            self._table.over.add(lease.request_id)


def prompt_digest(token_ids: Sequence[int], cache_salt: str) -> bytes:
    """sha256 over salt and tokens: both ends must mean the same text before KV crosses."""
    digest = hashlib.sha256(f"{len(cache_salt)}:{cache_salt}".encode())
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return digest.digest()
