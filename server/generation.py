"""The sequences of one HTTP request, from submission to the last delta.

  submit --> outputs arrive (put, in the event loop) --> next_deltas() --> ... --> every choice has finished
                 |                                          ^
                 +-- abort(error): deadline, client gone, shutdown; the reader gets the error at its next turn

Leaving the `with` block cancels at the nodes whatever still runs, for whichever reason it is left.
What a slow client has not read waits here; `max_tokens` bounds it, and it goes out joined once the client reads.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from connector.server_messages import TokenOutput
from engine.errors import ErrorKind, PdserveError, RequestError, ServingError
from server.choice import Choice, Delta
from server.fleet import Flight
from server.metrics import SequenceBooks


class ClientGone(PdserveError):
    """The client closed the connection; nobody reads the answer."""


class _Sequence:
    """One choice with its flight and its books: the sink that the node client delivers to."""

    def __init__(self, generation: "Generation", choice: Choice, books: SequenceBooks) -> None:
        self._generation = generation
        self.choice = choice
        self.books = books
        self.flight: Flight | None = None

    def put(self, output: TokenOutput, now: float) -> None:
        if output.prompt_logprobs is not None:
            self.choice.prompt_logprobs.append(output.prompt_logprobs)
            return
        if output.tokens:
            self.books.tokens(len(output.tokens), now)
        self._generation.arrived(self, output)

    def end(self, reason: str) -> None:
        self.books.finish(reason, time.monotonic(), self.choice.num_cached_tokens)
        if self.flight is not None:
            self.flight.cancel()


class Generation:
    """All choices of one request. Belongs to the event loop."""

    def __init__(self, *, on_close: Callable[["Generation"], None]) -> None:
        self.choices: list[Choice] = []
        self._open: dict[int, _Sequence] = {}
        self._arrived: list[tuple[_Sequence, TokenOutput]] = []
        self._wakeup = asyncio.Event()
        self._failure: PdserveError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._on_close = on_close

    def add(self, choice: Choice, books: SequenceBooks, launch: Callable[[_Sequence], Flight]) -> None:
        """Starts one more sequence; `launch` sends it off and is given the sink for its outputs."""
        sequence = _Sequence(self, choice, books)
        self.choices.append(choice)
        self._open[choice.index] = sequence
        sequence.flight = launch(sequence)

    def expire_in(self, seconds: float) -> None:
        error = ServingError(f"not finished within {seconds:g} s", kind=ErrorKind.DEADLINE_EXCEEDED)
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort, error)

    def arrived(self, sequence: _Sequence, output: TokenOutput) -> None:
        self._arrived.append((sequence, output))
        self._wakeup.set()

    async def next_deltas(self) -> list[Delta]:
        """What arrived since the last call, waiting for the first; [] once every choice has finished.

        Raises what ended the request early: `ServingError`, `RequestError`, `ClientGone`.
        """
        while self._open:
            if not self._arrived and self._failure is None:
                self._wakeup.clear()
                await self._wakeup.wait()
            if self._failure is not None:
                raise self._failure
            if deltas := self._apply_arrived():
                return deltas
        return []

    def abort(self, error: PdserveError) -> None:
        """Ends the request from outside. Work on the nodes stops now, even if nobody reads."""
        if self._failure is None and self._open:
            self._failure = error
            self._end_all("abort" if isinstance(error, ClientGone) else "error")
            self._wakeup.set()

    def close(self) -> None:
        """Ends what still runs. Safe to call again."""
        self._end_all("abort")
        self._open.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_close(self)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _apply_arrived(self) -> list[Delta]:
        arrived, self._arrived = self._arrived, []
        deltas = []
        for sequence, output in arrived:
            if sequence.choice.index not in self._open:
                continue
            if output.finish_reason in ("error", "abort"):
                # Raised at the reader's next turn: what came before it is still delivered.
                self.abort(_failure_of(output))
                break
            deltas.append(self._apply(sequence, output))
        return deltas

    def _apply(self, sequence: _Sequence, output: TokenOutput) -> Delta:
        delta = sequence.choice.add(output)
        if delta.finish_reason is not None:
            del self._open[delta.index]
            sequence.end(delta.finish_reason)
        return delta

    def _end_all(self, reason: str) -> None:
        for sequence in self._open.values():
            sequence.end(reason)


def _failure_of(output: TokenOutput) -> ServingError | RequestError:
    """Whom we cancelled we do not hear any more: an abort that does arrive is the node giving the request up."""
    if output.finish_reason == "abort":
        return ServingError("the node gave the request up", kind=ErrorKind.PEER_UNREACHABLE)
    if output.error_kind is ErrorKind.INVALID_REQUEST:
        return RequestError(output.error, param=output.error_param or None)
    return ServingError(output.error or "the node failed", kind=output.error_kind or ErrorKind.INTERNAL)
