"""The waiting line: lower priority first, within one first come first served, with O(1) removal from the middle and a
way back to the front of one's own priority."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.request import Request


class RequestQueue:
    """Request ids are unique in it."""

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[str, Request]] = {}
        """One for each priority that somebody waits with; none is empty."""
        self._priorities: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._lanes):
            yield from self._lanes[priority].values()

    def push_back(self, request: Request) -> None:
        self._priorities[request.request_id] = request.priority
        self._lanes.setdefault(request.priority, OrderedDict())[request.request_id] = request

    def push_front(self, requests: Sequence[Request]) -> None:
        """Puts them ahead of all others of their priority, in the order given."""
        for request in reversed(requests):
            self.push_back(request)
            self._lanes[request.priority].move_to_end(request.request_id, last=False)

    def pop_front(self) -> Request:
        request = next(iter(self._lanes[min(self._lanes)].values()))
        self.discard(request.request_id)
        return request

    def discard(self, request_id: str) -> None:
        priority = self._priorities.pop(request_id, None)
        if priority is not None:
            del self._lanes[priority][request_id]
            if not self._lanes[priority]:
                del self._lanes[priority]
