"""What an endpoint's answer is to the code that sends it."""

from collections.abc import Sequence
from typing import Any, Protocol

from server.choice import Delta
from server.generation import Generation


class Reply(Protocol):
    """Turns deltas into response bytes, whole or as a stream of events."""

    @property
    def generation(self) -> Generation: ...

    def opening(self) -> bytes:
        """Sent with the first output."""

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def closing(self) -> bytes:
        """Once every choice has finished."""

    def failed(self, error: dict[str, Any]) -> bytes:
        """Instead of `closing` when the request fails in mid-stream; `error` is as in a response of its own."""

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The response in one piece; `deltas` are all there were."""
