"""How much may be under way at once. What is over it is refused before any work is done for it.

  request arrives --> room for one? --> body read --> room for all of its sequences? --> prompts tokenized --> nodes
                      no: 429                         no: 429

In flight are the sequences of the requests that were submitted, and one for each request that is still being read.
"""

from typing import Protocol

from prometheus_client import Counter

from engine.errors import ErrorKind, ServingError

DEFAULT_LIMIT = 256
"""Where no node is known yet."""


class Nodes(Protocol):
    """What the nodes say of themselves."""

    @property
    def capacity(self) -> int:
        """Sequences that the ready nodes run or let wait; 0 if none is ready."""

    @property
    def is_full(self) -> bool:
        """Whether every ready node has as many as that, from whichever server."""


class Admission:
    """The books of one server. Belongs to the event loop."""

    def __init__(self, max_in_flight: int | None, nodes: Nodes, num_rejected: Counter) -> None:
        self.num_requests = 0
        """HTTP requests that ask for work, from their head to the end of the response."""
        self.num_submitted = 0
        """Those of them whose sequences are at the nodes."""
        self.num_sequences = 0
        self._max_in_flight = max_in_flight
        self._nodes = nodes
        self._num_rejected = num_rejected

    @property
    def num_in_flight(self) -> int:
        return self.num_sequences + max(0, self.num_requests - self.num_submitted)

    def refusal(self) -> str | None:
        """Why one more request cannot be taken; None if it can."""
        return self._refusal(self.num_in_flight, 1)

    def check(self, num_sequences: int) -> None:
        """Raises `ServingError` if a request that was taken in has too many sequences for now. One that is alone may
        have any number, or it would never be served."""
        others = max(0, self.num_in_flight - 1)
        reason = self._refusal(others, num_sequences) if others else None
        if reason is not None:
            self.reject()
            raise ServingError(reason, kind=ErrorKind.OVERLOADED)

    def reject(self) -> None:
        self._num_rejected.inc()

    def _refusal(self, num_in_flight: int, num_more: int) -> str | None:
        if num_in_flight + num_more > self._limit:
            return f"{num_in_flight} sequences are in flight, {num_more} more would be too many; try again later"
        return "the queues of all nodes are full; try again later" if self._nodes.is_full else None

    @property
    def _limit(self) -> int:
        return (self._nodes.capacity or DEFAULT_LIMIT) if self._max_in_flight is None else self._max_in_flight
