"""What is kept of each request. All times are seconds on the client's clock."""

from dataclasses import dataclass, field
from typing import Any

UNFINISHED = "unfinished"
"""Cut off by us when the test ended: neither completed nor an error of the server."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Latencies count from `intended`, so that a request which left late is not reported as fast."""

    kind: str
    conversation: int
    turn: int
    intended: float
    """When it was to start: the planned arrival, or, in a closed loop, the end of the one before."""
    asked_input_tokens: int | None = None
    asked_output_tokens: int = 0
    released: float | None = None
    """When the client had it ready; what --max-concurrency makes it wait comes after."""
    sent: float | None = None
    status: int | None = None
    token_times: list[float] = field(default_factory=list)
    """Arrival of each event that bears tokens."""
    done: float | None = None
    """End of the response."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """The server's count, as is `completion_tokens`."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    error_kind: str | None = None
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.done is not None and self.error_kind is None

    @property
    def failed(self) -> bool:
        return self.error_kind not in (None, UNFINISHED)

    @property
    def lag(self) -> float | None:
        """How much later than planned the client had it ready: the client's own fault."""
        return None if self.released is None else self.released - self.intended

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.intended if self.token_times else None

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """From the first token to the last, over the tokens after the first."""
        if len(self.token_times) < 2 or self.num_output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def e2el(self) -> float | None:
        return None if self.done is None else self.done - self.intended

    @property
    def num_output_tokens(self) -> int:
        """As the server counts; without its count, the events that bear tokens."""
        return len(self.token_times) if self.completion_tokens is None else self.completion_tokens

    def fail(self, kind: str, error: str) -> None:
        """The first reason stands."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, error[:300]

    def to_json(self, origin: float) -> dict[str, Any]:
        """Times from `origin`, the start of the round; the latencies under vLLM's names, in seconds."""
        return {
            "kind": self.kind,
            "conversation": self.conversation,
            "turn": self.turn,
            "start": self.intended - origin,
            "lag": self.lag,
            "waited": None if self.sent is None or self.released is None else self.sent - self.released,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "itl": self.itl,
            "e2el": self.e2el,
            "asked_input_tokens": self.asked_input_tokens,
            "asked_output_tokens": self.asked_output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "timings": self.timings,
            "status": self.status,
            "error_kind": self.error_kind,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """The record of `to_json`, with its round starting at 0."""
        start, ttft = data["start"], data["ttft"]
        times = [] if ttft is None else [start + ttft]
        for gap in data["itl"]:
            times.append(times[-1] + gap)
        return cls(
            intended=start,
            released=None if data["lag"] is None else start + data["lag"],
            sent=None if data["waited"] is None else start + data["lag"] + data["waited"],
            token_times=times,
            done=None if data["e2el"] is None else start + data["e2el"],
            **{name: data[name] for name in _SAME_IN_JSON},
        )


_SAME_IN_JSON = (
    "kind",
    "conversation",
    "turn",
    "asked_input_tokens",
    "asked_output_tokens",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "finish_reason",
    "timings",
    "status",
    "error_kind",
    "error",
)
