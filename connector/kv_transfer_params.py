"""`kv_transfer_params` as routers written for vLLM's two-leg protocol send and expect them.

  router -> prefill node   do_remote_decode: keep the KV of this prompt when the request is over
  prefill node -> router   do_remote_prefill and where it is held; the router passes this on unread
  router -> decode node    the same: load the prompt's KV from there

What names a place (`remote_host`, `remote_port`) is written for the routers' sake and never dialled: the holder is
looked up in the peer table by `remote_engine_id` (name and epoch), the KV there by `remote_request_id` (the lease).
Unknown keys are ignored, as other servers' params carry many.
"""

from typing import Annotated

from msgspec import Meta, Struct

from connector.identity import Count, Text

Port = Annotated[int, Meta(ge=0, le=65535)]


class KVTransferParams(Struct, frozen=True, kw_only=True):
    """One JSON object, in a request's body or at the top of a response's. Explicit nulls are as good as absence."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    """Names the lease on its holder; minted there, never by a client."""
    remote_block_ids: list[Count | list[Count]] | None = None
    """For the routers' sake: the blocks are found by the lease."""
    remote_host: Text | None = None
    remote_port: Port | None = None
    remote_num_tokens: Count | None = None
    """Leading prompt tokens whose KV is held."""
    remote_prefill_cached_tokens: Count | None = None
    remote_blocks_expiry_time: float | None = None
    """Unix time in seconds when the lease ends unless it is renewed. Advisory: the holder's own clock decides."""
    tp_size: Count | None = None
    transfer_mode: Text | None = None
    protocol_version: Count | None = None


def engine_id(name: str, epoch: str) -> str:
    """`remote_engine_id`: changes with every start of the process, as routers expect of it."""
    return f"{name}@{epoch}"


def split_engine_id(remote_engine_id: str | None) -> tuple[str, str] | None:
    """(name, epoch) of the holder; None for what `engine_id` did not make."""
    name, separator, epoch = (remote_engine_id or "").rpartition("@")
    return (name, epoch) if separator and name else None
