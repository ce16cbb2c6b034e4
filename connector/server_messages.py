"""The link between the server and a node. The server dials, the node listens.

  server                                       node (prefill or decode)
    | ServerHello ------------------------------> |
    | <------------------------------- NodeHello  |   identity; refused here if the models differ
    | ServerPing  ------------------------------> |   every heartbeat interval
    | <------------------------------- NodePong   |   readiness and load
    |                                             |
    | Generate -----------------------------> decode node
    | <------------------- Tokens (one per step, all requests of this server)
    | Cancel  ------------------------------> decode node
    | ReleaseKV ----------------------------> any node
    |                                             |
    | <------------------------------ NodeGoodbye |   the node is going down

Every `Generate` is answered by `TokenOutput`s of which exactly one, the last, has `finish_reason` set.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from connector.codec import Decoder
from connector.identity import Count, ModelIdentity, Name, Priority, Text, TokenId
from connector.kv_transfer_params import KVTransferParams
from engine.errors import ErrorKind
from engine.prompt_logprobs import PromptLogprobs
from engine.request import SampledToken
from engine.sampling_params import SamplingParams
from engine.trace import TraceContext

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length", "abort", "error"]


class _Message(Struct, frozen=True, tag=True, kw_only=True):
    """Tagged by class name."""


class NodeLoad(Struct, frozen=True, kw_only=True):
    """A node's load at one moment."""

    num_running: Count = 0
    num_waiting: Count = 0
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0


class ServerHello(_Message, frozen=True, tag=True, kw_only=True):
    protocol_version: Count


class ServerPing(_Message, frozen=True, tag=True, kw_only=True):
    sequence: Count


class Generate(_Message, frozen=True, tag=True, kw_only=True):
    request_id: Name
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling: SamplingParams
    cache_salt: Text = ""
    priority: Priority = 0
    prefill_nodes: list[Name] = []
    """Candidates by node name, best first. The decode node knows their addresses from its own peer table."""
    kv_transfer_params: KVTransferParams | None = None
    """A leg of a router's two-leg request."""
    trace: TraceContext | None = None


class Cancel(_Message, frozen=True, tag=True, kw_only=True):
    request_ids: list[Name]


class ReleaseKV(_Message, frozen=True, tag=True, kw_only=True):
    """The second leg will not come: whoever holds this KV may free it now and need not wait for the lease's end."""

    kv_transfer_params: KVTransferParams


class NodeHello(_Message, frozen=True, tag=True, kw_only=True):
    protocol_version: Count
    role: Role
    name: Name
    epoch: Name
    """New at every start of the process."""
    model: ModelIdentity
    max_model_len: Count
    num_blocks: Count
    max_num_seqs: Count = 0
    """Most sequences that run at once."""


class NodePong(_Message, frozen=True, tag=True, kw_only=True):
    sequence: Count
    ready: bool
    reason: Text = ""
    """Why not ready."""
    load: NodeLoad
    ready_peers: list[Name] = []
    """On a decode node: the prefill nodes it has shaken hands with."""


class TokenOutput(Struct, frozen=True, kw_only=True):
    """What one request gained in one step."""

    request_id: Name
    tokens: list[SampledToken] = []
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | None = None
    """The stop token that ended it; None for the model's own end token."""
    is_last_text: bool = False
    """It stopped at a token that belongs to the text: nothing could follow it."""
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    error_kind: ErrorKind | None = None
    error: Text = ""
    error_param: Text = ""
    """The field of the client's request that is at fault, if one is."""
    kv_transfer_params: KVTransferParams | None = None
    """With the final output of a request that asked for its KV to be held."""
    prompt_logprobs: PromptLogprobs | None = None
    """One piece. Those of a prompt come in order, before the output with the first token."""


class Tokens(_Message, frozen=True, tag=True, kw_only=True):
    outputs: list[TokenOutput]


class NodeGoodbye(_Message, frozen=True, tag=True, kw_only=True):
    reason: Text


FromServer = ServerHello | ServerPing | Generate | Cancel | ReleaseKV
FromNode = NodeHello | NodePong | Tokens | NodeGoodbye

decode_from_server: Decoder[FromServer] = Decoder(FromServer)
decode_from_node: Decoder[FromNode] = Decoder(FromNode)
