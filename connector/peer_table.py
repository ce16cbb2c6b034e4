"""The prefill nodes that a decode node knows: the only addresses that it ever dials for KV."""

import time
from collections.abc import Callable, Iterator, Sequence

from connector.link import Links
from connector.peer_messages import PeerHello
from connector.prefill_peer import PeerOwner, PeerState, PrefillPeer


class PeerTable:
    """Filled once, at the start."""

    def __init__(
        self, hello: PeerHello, peer_timeout: float, owner: PeerOwner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hello = hello
        self._peer_timeout = peer_timeout
        self._owner = owner
        self._clock = clock
        self._peers: list[PrefillPeer] = []

    def __iter__(self) -> Iterator[PrefillPeer]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def __getitem__(self, index: int) -> PrefillPeer:
        return self._peers[index]

    def dial(self, links: Links, addresses: Sequence[str]) -> None:
        for address in addresses:
            peer = PrefillPeer(address, self._hello, self._peer_timeout, self._owner, self._clock)
            self._peers.append(peer)
            peer.dial(links)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def ready_names(self) -> list[str]:
        return [peer.name for peer in self._peers if peer.state is PeerState.READY]

    def pick(
        self, candidates: Sequence[str], tried: frozenset[str] = frozenset(), epoch: str | None = None
    ) -> PrefillPeer | None:
        """The first of `candidates`, best first and empty for any, that is ready, not in `tried`, and in `epoch`."""
        ready = {peer.name: peer for peer in self._peers if peer.state is PeerState.READY and peer.name not in tried}
        found = next((ready[name] for name in candidates or ready if name in ready), None)
        return found if found is not None and epoch in (None, found.epoch) else None

    def describe(self) -> str:
        """Each peer's name and what keeps it from being ready, for error messages."""
        return ", ".join(f"{peer.name}: {peer.reason or peer.state.value}" for peer in self._peers)
