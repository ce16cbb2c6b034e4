"""The one loop of a node: take what came in, step the engine, hand out what it made; block when there is nothing to do.

Everything from other threads goes through the inbox. The engine itself is touched by this loop's thread only.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from connector.p2p_scheduler import ShipKV
from connector.peer_messages import Prefill
from engine.engine import Engine
from engine.errors import RequestError
from engine.outputs import RequestOutput
from engine.request import Request

logger = logging.getLogger(__name__)

OnOutputs = Callable[[Sequence[RequestOutput]], None]
OnRefused = Callable[[Request, RequestError], None]


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
    """Only ends the loop."""


class EngineLoop:
    """Implements `GrantTaker` and `RequestTaker`. All methods but `run` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Wake | _Stop] = queue.SimpleQueue()
        self._is_stopping = False

    def submit(self, request: Request) -> None:
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
                kv_transfer=ShipKV(grant.start, grant.end, grant.wants_first_token),
            )
        )

    def abort(self, request_id: str) -> None:
        self._inbox.put(_Abort(request_id))

    def wake(self) -> None:
        self._inbox.put(_Wake())

    def stop(self) -> None:
        """The loop ends after its current step. Safe to call from a signal handler."""
        self._inbox.put(_Stop())

    def run(self, engine: Engine, on_outputs: OnOutputs, on_refused: OnRefused) -> None:
        """Returns after `stop`. An exception is a bug and ends the process."""
        while True:
            self._take_in(engine, on_refused, block=not engine.has_work())
            if self._is_stopping:
                return
            outputs = engine.step()
            if outputs:
                on_outputs(outputs)

    def _take_in(self, engine: Engine, on_refused: OnRefused, *, block: bool) -> None:
        if block:
            self._handle(engine, on_refused, self._inbox.get())
        while not self._inbox.empty():
            self._handle(engine, on_refused, self._inbox.get())

    def _handle(self, engine: Engine, on_refused: OnRefused, event: _Add | _Abort | _Wake | _Stop) -> None:
        match event:
            case _Add(request=request):
                try:
                    engine.add_request(request)
                except RequestError as error:
                    logger.warning("refused request %s: %s", request.request_id, str(error))
                    on_refused(request, error)
            case _Abort(request_id=request_id):
                engine.abort_request(request_id)
            case _Wake():
                pass
            case _Stop():
                self._is_stopping = True
