"""The link over which KV travels. The decode node dials; the prefill node listens.

  decode node                                    prefill node
    | PeerHello ---------------------------------> |   identity, KV memory on offer, credit
    | <-------------- PeerWelcome or PeerRefused   |   epoch, chosen transport
    | ExpressHello ------------------------------> |   over a second connection, for copies of first tokens
    | PeerPing  ---------------------------------> |   every heartbeat interval
    | <--------------------------------- PeerPong  |   with the engine's step count: a queue that moves is progress
    |                                              |
    | Prefill ------------------------------------>|   the grant: compute [0, end), ship [start, end) into block_ids
    | <==== Unit (layer 0, [start, a)) + payload   |   one per layer and chunk, any order, idempotent
    | <==== Unit ...                               |
    | Credit ------------------------------------->|   bytes taken in: the window moves on
    | <------------------------------- PromptPiece |   if wanted, in pieces, all of them before the first token
    | <-------------------------------- FirstToken |   as soon as it is sampled; a copy by express, ahead of KV
    | <==== Unit ...                               |
    | <------------------------------- PrefillDone |   nothing of this transfer follows
    |                                              |
    | Pull --------------------------------------->|   instead of Prefill: ship KV that is held under a lease
    | ReleaseLease ------------------------------->|   nobody will come for it
    |                                              |
    | CancelTransfer ----------------------------->|
    | <---------------------------- TransferClosed |   nothing of this transfer will be written any more
    | <---------------------------- TransferFailed |   the same, and why, where the prefill node gave up

A message's frames: [header] or, for a `Unit` on the message transport, [header, payload]. The payload of `[a, b)` holds
for each block it touches, in order of position, the slots in question: `[2, slots, num_kv_heads, head_dim]`.
On shared memory the payload was already written into the granted blocks when the `Unit` arrives.

Every message from the prefill node about a transfer carries the epoch of the process that sent it; what carries
another epoch than the one welcomed, or names an unknown transfer, is counted and dropped.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from connector.codec import Decoder
from connector.identity import Count, ModelIdentity, Name, Priority, Text, TokenId
from engine.errors import ErrorKind
from engine.prompt_logprobs import PromptLogprobs
from engine.request import SampledToken
from engine.sampling_params import SamplingParams
from engine.trace import TraceContext

Transport = Literal["shm", "zmq"]


class _Message(Struct, frozen=True, tag=True, kw_only=True):
    """Tagged by class name."""


class SharedMemoryOffer(Struct, frozen=True, kw_only=True):
    """Where a process on the same host finds our KV memory. See `shared_kv`."""

    pid: Count
    fd: Count
    num_bytes: Count
    num_blocks: Count
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]


class PeerHello(_Message, frozen=True, tag=True, kw_only=True):
    protocol_version: Count
    name: Name
    epoch: Name
    model: ModelIdentity
    credit_bytes: Count
    """How many payload bytes may be under way to us at once."""
    wants_digests: bool = True
    """Of every unit that travels as a message."""
    shared_memory: SharedMemoryOffer | None = None


class PeerWelcome(_Message, frozen=True, tag=True, kw_only=True):
    name: Name
    epoch: Name
    transport: Transport
    pid: Count


class PeerRefused(_Message, frozen=True, tag=True, kw_only=True):
    reason: Text


class ExpressHello(_Message, frozen=True, tag=True, kw_only=True):
    """Over the second connection: it belongs to the decode node that was welcomed in this epoch. On the first one a
    first token would stand in line behind all the KV that is under way."""

    epoch: Name


class PeerPing(_Message, frozen=True, tag=True, kw_only=True):
    sequence: Count
    transfer_ids: list[Name] = []
    """All the transfers that are still wanted; the prefill node drops any other."""
    lease_ids: list[Name] = []
    """Held KV that a waiting request will come for."""


class PeerPong(_Message, frozen=True, tag=True, kw_only=True):
    sequence: Count
    num_steps: Count
    """Engine steps since start."""
    unknown_transfer_ids: list[Name] = []
    """Of those asked for: nothing of them will ever come."""


class Prefill(_Message, frozen=True, tag=True, kw_only=True):
    """The grant."""

    transfer_id: Name
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    """The leading `end` tokens of the prompt."""
    wants_first_token: bool
    """False where `end` is not the prompt's end: what would be sampled is not an output token."""
    sampling: SamplingParams
    eos_token_ids: list[TokenId] = []
    cache_salt: Text = ""
    priority: Priority = 0
    start: Count
    end: Count
    block_ids: list[Count]
    """Block table of the request on the decode node, from position 0."""
    trace: TraceContext | None = None


class Pull(_Message, frozen=True, tag=True, kw_only=True):
    """The second supply mode: ship `[start, end)` of KV that is held under a lease."""

    transfer_id: Name
    lease_id: Name
    digest: Annotated[bytes, Meta(max_length=32)]
    """sha256 over cache salt and the leading `end` tokens; see `leases.prompt_digest`."""
    start: Count
    end: Count
    block_ids: list[Count]
    """Block table of the request on the decode node, from position 0."""


class ReleaseLease(_Message, frozen=True, tag=True, kw_only=True):
    lease_id: Name


class CancelTransfer(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name


class PeerGoodbye(_Message, frozen=True, tag=True, kw_only=True):
    """From either end: it is going down, and wants nothing more."""


class Credit(_Message, frozen=True, tag=True, kw_only=True):
    num_bytes: Count


class Unit(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name
    epoch: Name
    layer: Count
    start: Count
    end: Count
    digest: Annotated[bytes, Meta(max_length=8)] = b""
    """xxh3-64 of the payload, big-endian; empty where the payload did not travel as a message, or none is wanted."""
    num_bytes: Count
    saved_at: float
    """Sender's monotonic clock when the layer's KV was complete. Comparable on one host only."""


class PromptPiece(_Message, frozen=True, tag=True, kw_only=True):
    """Not counted against the credit: a position takes at most 168 bytes, a hundredth of its KV."""

    transfer_id: Name
    epoch: Name
    logprobs: PromptLogprobs


class FirstToken(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name
    epoch: Name
    token: SampledToken | None
    """None where it was not wanted."""
    num_cached_tokens: Count


class PrefillDone(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name
    epoch: Name
    computed_at: float
    """Sender's monotonic clock when the last layer of the prompt was computed."""


class TransferClosed(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name
    epoch: Name


class TransferFailed(_Message, frozen=True, tag=True, kw_only=True):
    transfer_id: Name
    epoch: Name
    kind: ErrorKind
    reason: Text


_OfTransfer = Unit | PromptPiece | FirstToken | PrefillDone | TransferClosed | TransferFailed
FromDecode = PeerHello | ExpressHello | PeerPing | Prefill | Pull | ReleaseLease | CancelTransfer | Credit | PeerGoodbye
FromPrefill = PeerWelcome | PeerRefused | PeerPong | PeerGoodbye | _OfTransfer

decode_from_decode_node: Decoder[FromDecode] = Decoder(FromDecode)
decode_from_prefill_node: Decoder[FromPrefill] = Decoder(FromPrefill)
