"""The side room of requests whose grammar is being compiled."""

from collections.abc import Callable

from engine.grammar_matcher import GrammarMatcher
from engine.grammar_pool import Compiled, GrammarPool
from engine.request import Request, RequestState


class GrammarRoom:
    """Gives requests their matchers, at once where the grammar is known already."""

    def __init__(self, pool: GrammarPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._waiting: dict[str, tuple[Request, Compiled]] = {}

    def enter(self, request: Request) -> None:
        """A request that waits, with a grammar, and holds nothing."""
        assert request.sampling.grammar is not None
        compiled = self._pool.find(request.sampling.grammar)
        request.move(RequestState.WAITING_FOR_GRAMMAR, self._clock())
        self._waiting[request.request_id] = (request, compiled)

    def leave(self) -> list[tuple[Request, str]]:
        """Sends on whoever's grammar is compiled; the others' that could not be, and why."""
        failed = []
        for request_id, (request, compiled) in list(self._waiting.items()):
            if request.is_finished:
                del self._waiting[request_id]
            elif compiled.done():
                del self._waiting[request_id]
                # Not `result()`, which would tie this frame, and with it the request, to an exception that is kept.
                if (error := compiled.exception()) is not None:
                    failed.append((request, str(error)))
                else:
                    request.matcher = _matcher_for(request, compiled)
                    request.move(RequestState.WAITING, self._clock())
        return failed


def _matcher_for(request: Request, compiled: Compiled) -> GrammarMatcher:
    """Stands where the request's output stands, if there is one already."""
    matcher = compiled.result().copy()
    for token in request.output:
        matcher.accept(token.token_id)
    return matcher
