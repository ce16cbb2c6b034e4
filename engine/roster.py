"""Where each live request is. In one place at a time, and moved here only, with its state.

waiting --> running --+
 ^   |        ^       |
 |   v        |       v
 | loading -> loaded  (preempted or started over: back to the front of its priority)
 +--------------------+
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

from engine.request import Request, RequestState
from engine.request_queue import RequestQueue


class Roster:
    """`running` is in order of admission; `loading` waits for KV, `loaded` has it and joins the next step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.loading: dict[str, Request] = {}
        self.loaded: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._clock = clock

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.push_back(request)

    def end(self, request: Request, state: RequestState) -> None:
        """It is over, wherever it was."""
        request.move(state, self._clock())
        del self.requests[request.request_id]
        self.waiting.discard(request.request_id)
        self._leave_places(request)

    def run(self, request: Request) -> None:
        request.move(RequestState.RUNNING, self._clock())
        self.running[request.request_id] = request

    def running_by_priority(self) -> list[Request]:
        """Lower priority first, within one in order of admission."""
        return sorted(self.running.values(), key=attrgetter("priority"))

    def rejoin_loaded(self) -> None:
        for request in self.loaded.values():
            self.run(request)
        self.loaded.clear()

    def load(self, request: Request) -> None:
        request.move(RequestState.WAITING_FOR_REMOTE_KVS, self._clock())
        self.loading[request.request_id] = request

    def finish_loading(self, request: Request) -> None:
        request.move(RequestState.WAITING, self._clock())
        self.loaded[request.request_id] = self.loading.pop(request.request_id)

    def send_back(self, request: Request) -> None:
        """To the front of its priority's line, from wherever it was; it owns nothing any more."""
        is_running = request.state is RequestState.RUNNING
        self._leave_places(request)
        if request.state is not RequestState.WAITING:
            request.move(RequestState.PREEMPTED if is_running else RequestState.WAITING, self._clock())
        self.waiting.push_front([request])

    def put_back(self, requests: Iterable[Request]) -> None:
        """To the front of their priorities, in order: they were only looked at."""
        self.waiting.push_front(list(requests))

    def _leave_places(self, request: Request) -> None:
        for place in (self.running, self.loading, self.loaded):
            place.pop(request.request_id, None)
