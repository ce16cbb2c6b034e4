"""The side room of requests whose grammar is being compiled."""

from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from engine.grammar import GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.request import Request, RequestState


class GrammarRoom:
    """Gives requests their matchers, at once where the grammar is known already."""

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float]) -> None:
        self._compiler = compiler
        self._clock = clock
        self._waiting: dict[str, tuple[Request, Future[LLMatcher]]] = {}

    def enter(self, request: Request) -> None:
        """A request that waits, with a grammar, and holds nothing."""
        assert request.sampling.grammar is not None
        future = self._compiler.find(request.sampling.grammar)
        request.move(RequestState.WAITING_FOR_GRAMMAR, self._clock())
        self._waiting[request.request_id] = (request, future)

    def leave(self) -> list[tuple[Request, str]]:
        """Sends on whoever's grammar is compiled; the others' that could not be, and why."""
        failed = []
        for request_id, (request, future) in list(self._waiting.items()):
            if request.is_finished:
                del self._waiting[request_id]
            elif future.done():
                del self._waiting[request_id]
                try:
                    request.matcher = self._compiler.matcher_of(future.result())
                    request.move(RequestState.WAITING, self._clock())
                except GrammarError as error:
                    failed.append((request, str(error)))
        return failed
