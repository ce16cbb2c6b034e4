"""Transfers that failed while their writer, over shared memory, may still be at it. Their blocks must not be used.

A writer that went silent is asked again and again to acknowledge; one that has died has no need to.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from connector.loads import OpenLoad
from connector.peer_messages import CancelTransfer
from connector.prefill_peer import PeerState, PrefillPeer
from connector.shared_kv import PeerProcess

DEATH_SECONDS = 0.1
"""A killed process closes its connections moments before it has ended."""


@dataclass(slots=True)
class Quarantined:
    """One transfer, and who may still write for it."""

    transfer_id: str
    request_id: str
    peer: PrefillPeer
    epoch: str
    process: PeerProcess | None


class Quarantine:
    """By transfer id. Its owner holds a lock."""

    def __init__(self) -> None:
        self._held: dict[str, Quarantined] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, load: OpenLoad) -> None:
        transfer = load.transfer
        self._held[transfer.transfer_id] = Quarantined(
            transfer.transfer_id, transfer.request_id, load.peer, load.epoch, load.peer.process
        )

    def acknowledged(self, peer: PrefillPeer, transfer_id: str) -> str | None:
        """The request whose blocks are safe now that `peer` said it is done; None if it was not waited for."""
        held = self._held.get(transfer_id)
        # The word of another life of the peer says nothing about what the former one may still do.
        if held is None or held.peer is not peer or held.epoch != peer.epoch:
            return None
        del self._held[transfer_id]
        return held.request_id

    def sweep(self) -> Iterator[str]:
        """The requests whose writers have died. Asks the living again: the first cancel may have been lost."""
        for held in list(self._held.values()):
            if held.process is not None and held.process.has_ended():
                del self._held[held.transfer_id]
                yield held.request_id
            elif held.peer.state is PeerState.READY:
                held.peer.send(CancelTransfer(transfer_id=held.transfer_id))


def is_fenced(peer: PrefillPeer) -> bool:
    """Whether nothing of the peer can reach our memory any more. Messages can be dropped at the door; a writer into
    shared memory must be dead. One that was just killed is, within moments."""
    if peer.transport == "zmq":
        return True
    return peer.process is not None and peer.process.has_ended(within=DEATH_SECONDS)
