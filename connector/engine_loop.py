"""The one loop of a node: take what came in, step the engine, hand out what it made; block when there is nothing to do.

Everything from other threads goes through the inbox. The engine itself is touched by this loop's thread only.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from connector.p2p_scheduler import ShipKV
from connector.peer_messages import Prefill
from engine.engine import Engine
from engine.errors import ErrorKind, RequestError
from engine.outputs import RequestOutput
from engine.request import Request

logger = logging.getLogger(__name__)

OnOutputs = Callable[[Sequence[RequestOutput]], None]
OnRefused = Callable[[Request, ErrorKind, str, str | None], None]
"""The request, why in a word and in a sentence, and the field at fault if one is."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Wake:
    """Only ends the wait."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """Nothing more is taken in; what is there may end until the deadline."""

    deadline: float


class EngineLoop:
    """Implements `GrantTaker` and `RequestTaker`. All methods but `run` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Wake | _Stop] = queue.SimpleQueue()
        self._deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._deadline is not None

    def submit(self, request: Request) -> None:
        if request.trace is not None:
            logger.info("request %s is of trace %s", request.request_id, request.trace.trace_id)
        request.arrival_time = self._clock()
        self._inbox.put(_Add(request))

    def take_grant(self, grant: Prefill) -> None:
        # One token, whatever the client asked for: the decode node makes the rest.
        sampling = replace(grant.sampling, max_tokens=1, min_tokens=min(1, grant.sampling.min_tokens))
        self.submit(
            Request(
                request_id=grant.transfer_id,
                prompt_token_ids=grant.prompt_token_ids,
                sampling=sampling,
                eos_token_ids=frozenset(grant.eos_token_ids),
                cache_salt=grant.cache_salt,
                priority=grant.priority,
                trace=grant.trace,
                kv_transfer=ShipKV(grant.start, grant.end, grant.wants_first_token),
            )
        )

    def abort(self, request_id: str) -> None:
        self._inbox.put(_Abort(request_id))

    def wake(self) -> None:
        self._inbox.put(_Wake())

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuses what comes from now on; the loop ends when the rest has ended, `drain_seconds` from now at the
        latest. Safe to call from a signal handler."""
        self._inbox.put(_Stop(self._clock() + drain_seconds))

    def run(self, engine: Engine, on_outputs: OnOutputs, on_refused: OnRefused) -> None:
        """Returns after `stop`. An exception is a bug and ends the process."""
        while not self._is_over(engine):
            self._take_in(engine, on_refused)
            outputs = engine.step()
            if outputs:
                on_outputs(outputs)

    def _is_over(self, engine: Engine) -> bool:
        return self._deadline is not None and (engine.is_idle() or self._clock() >= self._deadline)

    def _take_in(self, engine: Engine, on_refused: OnRefused) -> None:
        """All that has come; waits for something if there is nothing else to do."""
        if not engine.has_work():
            timeout = None if self._deadline is None else max(0.0, self._deadline - self._clock())
            with suppress(queue.Empty):
                self._handle(engine, on_refused, self._inbox.get(timeout=timeout))
        while not self._inbox.empty():
            self._handle(engine, on_refused, self._inbox.get())

    def _handle(self, engine: Engine, on_refused: OnRefused, event: _Add | _Abort | _Wake | _Stop) -> None:
        match event:
            case _Add(request=request) if self._deadline is not None:
                on_refused(request, ErrorKind.NO_NODE_READY, "the node is shutting down", None)
            case _Add(request=request):
                try:
                    engine.add_request(request)
                except RequestError as error:
                    logger.warning("refused request %s: %s", request.request_id, str(error))
                    on_refused(request, ErrorKind.INVALID_REQUEST, str(error), error.param)
            case _Abort(request_id=request_id):
                engine.abort_request(request_id)
            case _Wake():
                pass
            case _Stop(deadline=deadline):
                self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
