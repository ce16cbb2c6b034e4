"""The waiting line: first come first served, with O(1) removal from the middle and a way back to the front."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.request import Request


class RequestQueue:
    """Request ids are unique in it."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push_back(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_front(self, requests: Sequence[Request]) -> None:
        """Puts them ahead of all others, in the order given."""
        for request in reversed(requests):
            self._requests[request.request_id] = request
            self._requests.move_to_end(request.request_id, last=False)

    def pop_front(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def discard(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
