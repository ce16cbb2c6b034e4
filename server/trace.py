"""`traceparent` and `tracestate` of the request that is being handled.

A context variable, as in OpenTelemetry: whoever submits work for a request hands its trace on, whatever lies between.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar

from engine.trace import TraceContext

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
MAX_STATE_BYTES = 512

_TRACESTATE = re.compile(rb"[\x20-\x7e]*")

current_trace: ContextVar[TraceContext | None] = ContextVar("current_trace", default=None)


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """None where there is no valid `traceparent`, or more than one. A `tracestate` that is too long or malformed is
    dropped alone."""
    pairs = list(headers)
    parents = [value.strip() for name, value in pairs if name == TRACEPARENT]
    state = b",".join(value.strip() for name, value in pairs if name == TRACESTATE)
    if len(state) > MAX_STATE_BYTES or _TRACESTATE.fullmatch(state) is None:
        state = b""
    try:
        (parent,) = parents
        return TraceContext(parent.decode("ascii"), state.decode())
    except ValueError:
        return None
