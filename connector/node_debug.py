"""What /debug/state shows: everything that must be back at rest when nothing is going on."""

import contextlib
import os
import threading
from collections.abc import Mapping

from connector.incoming_transfer import IncomingTransfer
from connector.node_metrics import NodeParts


def debug_state(parts: NodeParts | None) -> Mapping[str, object]:
    """Plain data for JSON. Read without locks: figures of one moment may be a step apart."""
    state: dict[str, object] = {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "num_open_files": _num_open_files(),
        "num_sockets": _num_open_files("socket:"),
    }
    if parts is not None:
        state |= {"blocks": _blocks(parts), "queues": _queues(parts), "transfers": _transfers(parts)}
    return state


def _blocks(parts: NodeParts) -> Mapping[str, int]:
    pool = parts.engine.scheduler.pool
    return {
        "total": pool.num_blocks,
        "free": pool.num_free,
        "cached": pool.num_cached,
        "held": pool.num_held,
        "pinned": pool.num_pinned,
    }


def _queues(parts: NodeParts) -> Mapping[str, int]:
    scheduler = parts.engine.scheduler
    return {"running": scheduler.num_running, "waiting": scheduler.num_waiting, "loading": scheduler.num_loading}


def _transfers(parts: NodeParts) -> Mapping[str, object]:
    worker = parts.worker
    if worker is None:
        return {}
    transfers: dict[str, object] = {
        "outgoing": worker.sender.open_transfer_ids(),
        "leases": len(worker.leases),
        "decode_peers": worker.sender.peer_names,
    }
    if worker.receiver is not None:
        transfers |= {
            "incoming": [transfer.transfer_id for transfer in worker.receiver.open_transfers()],
            "quarantined": worker.receiver.num_quarantined,
            "prefill_peers": [
                {"name": p.name, "address": p.address, "state": p.state.value, "reason": p.reason, "over": p.transport}
                for p in worker.receiver.peers
            ],
            "recent": [_timeline(transfer) for transfer in list(worker.receiver.recent)],
        }
    return transfers


def _timeline(transfer: IncomingTransfer) -> Mapping[str, object]:
    """Stamps are of the decode node's monotonic clock, `computed_at` of the prefill node's: one clock on one host."""
    return {
        "transfer_id": transfer.transfer_id,
        "request_id": transfer.request_id,
        "start": transfer.start,
        "end": transfer.end,
        "num_bytes": transfer.num_bytes,
        "num_units": transfer.num_units,
        "num_hidden_bytes": transfer.num_hidden_bytes,
        "granted_at": transfer.granted_at,
        "layer_first_unit_at": transfer.layer_first_unit_at,
        "layer_complete_at": transfer.layer_complete_at,
        "first_token_at": transfer.first_token_at,
        "computed_at": transfer.done.computed_at if transfer.done is not None else None,
    }


def _num_open_files(kind: str = "") -> int | None:
    """Open file descriptors whose target begins with `kind`; None where the system does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    count = 0
    for name in names:
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(kind)
    return count
