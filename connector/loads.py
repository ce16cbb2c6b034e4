"""Loads on the decode node: what is ordered, what is open, what comes of it, and what is counted."""

from dataclasses import dataclass, field

from connector.incoming_transfer import IncomingTransfer
from connector.peer_messages import Prefill, Pull
from connector.prefill_peer import PrefillPeer
from engine.batch import LoadFailure, LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What to load: the grant, and the names of the nodes that may take it, best first; empty for any."""

    request_id: str
    grant: Prefill | Pull
    candidates: tuple[str, ...] = ()
    epoch: str | None = None
    """The one in which the candidate must be; None for any."""
    may_run_early: bool = True
    num_cached_tokens: int = 0
    """What the holder of pulled KV had found in its own cache; a prefill node says so with the first token."""


@dataclass(slots=True)
class OpenLoad:
    """An order that a peer has taken."""

    order: LoadOrder
    transfer: IncomingTransfer
    peer: PrefillPeer
    epoch: str
    tried: frozenset[str]
    is_cancelled: bool = False
    is_early: bool = False


@dataclass(slots=True)
class FinishedLoads:
    """What `take_finished` hands out; each request id once."""

    early: dict[str, LoadResult] = field(default_factory=dict)
    received: dict[str, LoadResult] = field(default_factory=dict)
    failed: dict[str, LoadFailure] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    """Cancelled or quarantined before; nothing reaches their blocks any more."""


@dataclass(slots=True)
class ReceiverCounters:
    """Only ever grow."""

    num_bytes: int = 0
    num_units: int = 0
    num_hidden_bytes: int = 0
    """Of these, what had arrived before the prefill's last layer was computed; on one host only."""
    num_late_units: int = 0
    num_digest_mismatches: int = 0
    num_transfers_received: int = 0
    num_transfers_failed: int = 0
    num_without_node: int = 0
    """Orders that no prefill node could take: none was ready any more, or none ever with --fallback fail."""
    num_next_candidates: int = 0
    """Transfers that were granted again, to another prefill node."""
    num_barrier_waits: int = 0
    """Layers at whose barrier a step had to wait."""
    barrier_seconds: float = 0.0
    longest_barrier_seconds: float = 0.0


def result_of(transfer: IncomingTransfer) -> LoadResult:
    first = transfer.first_token
    pieces = tuple(transfer.prompt_logprobs)
    if first is None:
        return LoadResult(num_remote_cached_tokens=transfer.num_cached_tokens, prompt_logprobs=pieces)
    return LoadResult(first_token=first.token, num_remote_cached_tokens=first.num_cached_tokens, prompt_logprobs=pieces)
