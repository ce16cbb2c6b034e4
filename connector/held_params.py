"""Held KV, written as a router's `kv_transfer_params` and read back on the node that is to pull it."""

import time
from urllib.parse import urlsplit

from msgspec import convert, to_builtins

from connector.codec import PROTOCOL_VERSION
from connector.identity import NodeIdentity
from connector.kv_transfer_params import KVTransferParams, engine_id, split_engine_id
from connector.leases import Lease
from connector.p2p_scheduler import PullKV
from engine.errors import RequestError
from engine.request import Request


def held_params(identity: NodeIdentity, kv_address: str, lease: Lease, request: Request) -> dict[str, object]:
    """What the router passes on to the decode node. Host and port are for the router's own books."""
    address = urlsplit(kv_address)
    params = KVTransferParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id=engine_id(identity.name, identity.epoch),
        remote_request_id=lease.lease_id,
        remote_block_ids=[list(lease.block_ids)],
        remote_host=address.hostname or "",
        remote_port=address.port or 0,
        remote_num_tokens=len(lease.token_ids),
        remote_prefill_cached_tokens=request.num_cached_tokens or 0,
        remote_blocks_expiry_time=time.time() + max(0.0, lease.deadline - time.monotonic()),
        tp_size=1,
        transfer_mode="pull",
        protocol_version=PROTOCOL_VERSION,
    )
    return dict(to_builtins(params))


def to_params(fields: dict[str, object]) -> KVTransferParams:
    return convert(fields, KVTransferParams)


def to_pull(params: KVTransferParams) -> PullKV:
    """Who holds it and under which lease. Raises `RequestError` naming the field that is missing or malformed."""
    holder = split_engine_id(params.remote_engine_id)
    if holder is None:
        raise _missing("remote_engine_id")
    if not params.remote_request_id:
        raise _missing("remote_request_id")
    if params.remote_num_tokens is None:
        raise _missing("remote_num_tokens")
    return PullKV(
        *holder,
        params.remote_request_id,
        params.remote_num_tokens,
        num_cached_tokens=min(params.remote_prefill_cached_tokens or 0, params.remote_num_tokens),
        is_held_after=bool(params.do_remote_decode),
    )


def _missing(field: str) -> RequestError:
    name = f"kv_transfer_params.{field}"
    return RequestError(f"{name} is not what a prefill node of this service returned", param=name)
