"""What crosses between scheduler and worker in one step: a `Batch` in, a `BatchResult` out. Ints and tuples only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.errors import ErrorKind
from engine.prompt_logprobs import PromptLogprobs, WantedLogprobs
from engine.request import SampledToken
from engine.sampling_params import SamplingParams


class ScheduledRequest(NamedTuple):
    """One request's share of a step. A named tuple: one is made per request and step, at a third of a frozen
    dataclass's cost.

    positions:  0 ........ num_computed_tokens ........ num_computed_tokens + len(token_ids)
                |  KV is in block_ids  |  computed in this step: token_ids  |
    """

    request_id: str
    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: Sequence[int]
    """The whole block table, covering at least the end of this step's tokens."""
    sampling: SamplingParams | None
    """None while prompt tokens remain after this step: nothing is sampled."""
    output_position: int = 0
    """Index of the output token that this step samples; with the seed it fixes the draw."""
    token_mask: bytes = b""
    """One bit for each token of the vocabulary, lowest first: which may be sampled. Empty allows all."""
    banned_token_ids: Sequence[int] = ()
    """Never sampled in this step: the end tokens while fewer than min_tokens were made."""
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    """Both are filled only where `sampling.needs_history`."""
    prompt_logprobs: WantedLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's work. Empty `requests` is a step too: it lets the connector report."""

    step: int
    requests: Sequence[ScheduledRequest] = ()
    connector_metadata: object | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    def with_connector_metadata(self, metadata: object | None) -> "Batch":
        return replace(self, connector_metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A finished load. `first_token` travels with the end of a transfer; None if the sender did not sample."""

    first_token: SampledToken | None = None
    num_remote_cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """Of the request's prompt, if it wanted them: consecutive, from position 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A load that will not be completed."""

    kind: ErrorKind
    reason: str
    num_valid_tokens: int | None = None
    """Leading positions whose KV is in its blocks and checked, local hit included. None: the local hit alone."""
    is_fenced: bool = True
    """False: a writer that went silent may still reach the blocks. They stay pinned until the id is in `sent`."""
    is_final: bool = False
    """True: the request ends in an error whatever the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOutput:
    """What the worker side of the connector saw since the last step; each request id once per kind.

    A request id in any of them also says that no byte of its blocks will be read or written by a transfer any more,
    except where a failure is not fenced: then the id comes again, in `sent`, once that is so. A load that was cancelled
    comes in `sent` too.
    """

    sent: frozenset[str] = frozenset()
    early: Mapping[str, LoadResult] = field(default_factory=dict)
    """Loads still open whose requests may run all the same: each layer's barrier waits for what is missing. The one
    kind after which the same id comes again."""
    received: Mapping[str, LoadResult] = field(default_factory=dict)
    failed: Mapping[str, LoadFailure] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sent or self.early or self.received or self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The worker's answer: a token for every request of the batch that had `sampling` set, or why there is none."""

    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    unsampled: Mapping[str, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[PromptLogprobs]] = field(default_factory=dict)
    connector_output: ConnectorOutput = ConnectorOutput()
