"""Builders with good defaults, and stand-ins for everything around the scheduler: clock, connector, worker."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engine.batch import Batch, BatchResult, ConnectorOutput, LoadFailure, LoadResult, ScheduledRequest
from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import ErrorKind
from engine.kv_connector import SchedulerConnector
from engine.outputs import RequestOutput
from engine.request import Request, SampledToken
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

EOS = 1
VOCAB_SIZE = 40
_request_numbers = count()


class FakeClock:
    """Stands still until told otherwise."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_request(
    num_tokens: int = 33,
    *,
    request_id: str | None = None,
    prompt: Sequence[int] | None = None,
    cache_salt: str = "",
    kv_transfer: object | None = None,
    priority: int = 0,
    **sampling: object,
) -> Request:
    """A greedy request that does not stop by itself; its prompt differs from that of any other builder's request."""
    number = next(_request_numbers)
    if prompt is None:
        prompt = [1000 * number + i for i in range(num_tokens)]
    return Request(
        request_id=request_id or f"request-{number}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
        eos_token_ids=frozenset({EOS}),
        cache_salt=cache_salt,
        kv_transfer=kv_transfer,
        priority=priority,
        arrival_time=100.0,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 1000,
    connector: SchedulerConnector | None = None,
    model_digest: str = "model",
    vocab_size: int | None = None,
    enable_prefix_caching: bool = True,
    grammars: Any = None,
    clock: Callable[[], float] | None = None,
    **settings: int,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**{"max_num_batched_tokens": 256, "max_num_seqs": 16, "watermark_blocks": 0, **settings}),
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        num_blocks,
        max_model_len,
        model_digest=model_digest,
        vocab_size=vocab_size,
        connector=connector,
        grammars=grammars,
        clock=clock or FakeClock(),
    )


@dataclass
class StubTransfer:
    """A transfer as the other end sees it: which positions go into, or come out of, which blocks."""

    request: Request
    block_ids: tuple[int, ...]
    start: int
    end: int
    is_sync: bool = False


@dataclass
class StubConnector(SchedulerConnector):
    """Answers as told in `answers` (by request id, default `(0, False)`), keeps books, reports when told.

    A request whose `kv_transfer` is "ship" is held at its end until `finish_ship`, a loading one while it loads.
    """

    answers: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    loads: dict[str, StubTransfer] = field(default_factory=dict)
    ships: dict[str, StubTransfer] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    allocated: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    taken_outputs: list[ConnectorOutput] = field(default_factory=list)
    _sent: set[str] = field(default_factory=set)
    _early: dict[str, LoadResult] = field(default_factory=dict)
    _received: dict[str, LoadResult] = field(default_factory=dict)
    _failed: dict[str, LoadFailure] = field(default_factory=dict)

    # The contract

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        num_tokens, is_async = self.answers.get(request.request_id, (0, False))
        if num_tokens is None:
            return None, False
        return max(0, num_tokens), is_async

    def ships_kv(self, request: Request) -> bool:
        return request.kv_transfer == "ship"

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, tuple(block_ids), num_external_tokens))
        if num_external_tokens:
            end = request.num_computed_tokens
            is_sync = not self.answers[request.request_id][1]
            self.loads[request.request_id] = StubTransfer(
                request, tuple(block_ids), end - num_external_tokens, end, is_sync
            )
        if self.ships_kv(request) and not request.num_preemptions:
            self.ships[request.request_id] = StubTransfer(request, tuple(block_ids), 0, request.num_prompt_tokens)

    def build_connector_meta(self, batch: Batch) -> object:
        self.batches.append(batch)
        return ("metadata of step", batch.step)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.taken_outputs.append(output)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        self.finished.append(request.request_id)
        is_held = request.request_id in self.loads or request.request_id in self.ships
        return is_held, {"held": request.request_id} if is_held else None

    def has_open_transfers(self) -> bool:
        return bool(self.loads or self.ships)

    def has_pending_metadata(self) -> bool:
        return False

    # The other end

    def finish_load(self, request_id: str, first_token: int | None = None, num_remote_cached_tokens: int = 0) -> None:
        self.loads.pop(request_id, None)
        self._received[request_id] = LoadResult(
            first_token=None if first_token is None else SampledToken(first_token),
            num_remote_cached_tokens=num_remote_cached_tokens,
        )

    def admit_early(self, request_id: str, first_token: int) -> None:
        self._early[request_id] = LoadResult(first_token=SampledToken(first_token))

    def fail(self, request_id: str, reason: str = "peer lost", *, is_fenced: bool = True, **fields: Any) -> None:
        """An unfenced failure leaves the load open until `close`; a ship of the same request goes on."""
        if is_fenced:
            (self.loads if request_id in self.loads else self.ships).pop(request_id, None)
        self._failed[request_id] = LoadFailure(
            kind=ErrorKind.KV_LOAD_FAILED, reason=reason, is_fenced=is_fenced, **fields
        )

    def close(self, request_id: str) -> None:
        """A cancelled or quarantined load, or a ship, is over."""
        self.loads.pop(request_id, None)
        self.ships.pop(request_id, None)
        self._sent.add(request_id)

    finish_ship = close

    def take_reports(self) -> ConnectorOutput:
        """What the worker side would hand over at the end of a step."""
        output = ConnectorOutput(
            sent=frozenset(self._sent), early=self._early, received=self._received, failed=self._failed
        )
        self._sent, self._early, self._received, self._failed = set(), {}, {}, {}
        return output


class ScriptedWorker:
    """Samples the tokens it was given for a request, in order, then 7 for ever."""

    def __init__(self, connector: StubConnector | None = None, **tokens: Sequence[int]) -> None:
        self.batches: list[Batch] = []
        self._connector = connector
        self._tokens: dict[str, Iterator[int]] = {name: iter(ids) for name, ids in tokens.items()}

    def script(self, request_id: str, tokens: Iterable[int]) -> None:
        self._tokens[request_id] = iter(tokens)

    def execute(self, batch: Batch) -> BatchResult:
        self.batches.append(batch)
        sampled = {
            request.request_id: SampledToken(next(self._tokens.get(request.request_id, iter(())), 7))
            for request in batch.requests
            if request.sampling is not None
        }
        reports = self._connector.take_reports() if self._connector is not None else ConnectorOutput()
        return BatchResult(sampled=sampled, connector_output=reports)


def next_token(token_ids: Sequence[int], banned: Sequence[int] = ()) -> int:
    """The model: any wrong token before changes what comes next."""
    token_id = zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


class PagedWorker:
    """A model whose KV of a token is the token: what it samples depends on all that its block tables lead to.

    Memory that nobody wrote is poison. With a stub connector, synchronous loads are filled and reported in the step
    that waits for them, unless their ids are in `failing_loads`.
    """

    POISON = 0xDEAD_BEEF

    def __init__(self, num_blocks: int, block_size: int, connector: StubConnector | None = None) -> None:
        self.failing_loads: set[str] = set()
        self.batches: list[Batch] = []
        self._memory = [[self.POISON] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._connector = connector

    def write(self, block_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            self._memory[block_ids[position // self._block_size]][position % self._block_size] = token_id

    def read(self, block_ids: Sequence[int], end: int) -> list[int]:
        return [self._memory[block_ids[i // self._block_size]][i % self._block_size] for i in range(end)]

    def fill(self, load: StubTransfer) -> None:
        """The load's KV arrives."""
        self.write(load.block_ids, load.start, load.request.prompt_token_ids[load.start : load.end])

    def poison(self, load: StubTransfer) -> None:
        """The load's KV arrives, and is rubbish."""
        self.write(load.block_ids, load.start, [self.POISON] * (load.end - load.start))

    def execute(self, batch: Batch) -> BatchResult:
        self.batches.append(batch)
        self._finish_sync_loads()
        for request in batch.requests:
            self.write(request.block_ids, request.num_computed_tokens, request.token_ids)
        sampled = {r.request_id: SampledToken(self._sample(r)) for r in batch.requests if r.sampling is not None}
        reports = self._connector.take_reports() if self._connector is not None else ConnectorOutput()
        return BatchResult(sampled=sampled, connector_output=reports)

    def _sample(self, request: ScheduledRequest) -> int:
        end = request.num_computed_tokens + len(request.token_ids)
        return next_token(self.read(request.block_ids, end), request.banned_token_ids)

    def _finish_sync_loads(self) -> None:
        if self._connector is None:
            return
        for request_id, load in list(self._connector.loads.items()):
            if not load.is_sync or load.request.is_finished:
                continue
            if request_id in self.failing_loads:
                self.poison(load)
                self._connector.fail(request_id)
            else:
                self.fill(load)
                self._connector.finish_load(request_id)


def undisturbed_output(request: Request, max_num_tokens: int) -> list[int]:
    """What `PagedWorker`'s model makes of the request when nothing else ever happens."""
    twin = Request(
        request_id="twin",
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        eos_token_ids=request.eos_token_ids,
    )
    state = None
    while state is None and twin.num_tokens < max_num_tokens:
        end_tokens = () if request.sampling.ignore_eos else request.eos_token_ids
        banned = [*end_tokens, *request.sampling.stop_token_ids]
        token_id = next_token(twin.token_ids, banned if twin.num_output_tokens < request.sampling.min_tokens else ())
        twin.append_output(SampledToken(token_id))
        state = twin.finish_state_for(token_id)
    return [token.token_id for token in twin.output]


def run_until_idle(engine: Engine, max_steps: int = 1000) -> list[RequestOutput]:
    """Steps until nothing is left; fails if that never comes."""
    outputs: list[RequestOutput] = []
    for _ in range(max_steps):
        if engine.is_idle():
            return outputs
        outputs += engine.step()
    raise AssertionError(f"not idle after {max_steps} steps")


def token_ids_of(outputs: Iterable[RequestOutput], request_id: str) -> list[int]:
    return [token.token_id for output in outputs if output.request_id == request_id for token in output.new_tokens]


def final_of(outputs: Iterable[RequestOutput], request_id: str) -> RequestOutput:
    """Its one final output; fails unless there is exactly one and it is the last."""
    own = [output for output in outputs if output.request_id == request_id]
    assert [output.finish_state is not None for output in own] == [False] * (len(own) - 1) + [True], own
    return own[-1]
