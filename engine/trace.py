"""The trace that a request belongs to, as its caller named it. Nothing here depends on it; it is handed on."""

import re
from dataclasses import dataclass

# https://www.w3.org/TR/trace-context/#traceparent-header: VERSION-TRACE_ID-PARENT_ID-FLAGS. Ids that are all zero are
# invalid, as is version ff; versions after 00 may append fields.
_FIELDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(f"00-{_FIELDS}|(?!00|ff)[0-9a-f]{{2}}-{_FIELDS}(-[!-~]{{0,64}})?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C Trace Context. Raises `ValueError` if `traceparent` is malformed."""

    traceparent: str
    tracestate: str = ""

    def __post_init__(self) -> None:
        if _TRACEPARENT.fullmatch(self.traceparent) is None:
            raise ValueError("malformed traceparent")

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]
