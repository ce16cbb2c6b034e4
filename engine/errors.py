"""Every error that pdserve raises on purpose.

PdserveError
├── ConfigError                  a flag, a file or a checkpoint cannot be served; the process stops at start
│   └── UnsupportedModelError    the checkpoint asks for something the decoder does not implement
├── RequestError                 the user's fault (HTTP 4xx); names the field
├── ServingError                 ours: an accepted request cannot be finished (HTTP 5xx); carries an `ErrorKind`
├── InvalidTransition            a request was moved along an edge that does not exist: a bug
├── PoolCorrupted                the block pool's books do not balance: a bug
└── LinkError                    a link to another process failed
    ├── MalformedMessage         bytes that are not a message of this link
    └── HandshakeRefused         the peer serves something else; the text says what
"""

from enum import StrEnum


class ErrorKind(StrEnum):
    """Why an accepted request ended in an error. Crosses process borders; the server maps it to a status."""

    KV_LOAD_FAILED = "kv_load_failed"
    PEER_UNREACHABLE = "peer_unreachable"
    NO_NODE_READY = "no_node_ready"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OVERLOADED = "overloaded"
    INVALID_REQUEST = "invalid_request"
    INTERNAL = "internal"


class PdserveError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PdserveError):
    """A setting, file or checkpoint that cannot be served. The message names the flag."""


class UnsupportedModelError(ConfigError):
    """The checkpoint needs an architecture or variant that the decoder does not implement."""


class RequestError(PdserveError):
    """A request that cannot be served as sent. `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ServingError(PdserveError):
    """An accepted request that we failed to finish."""

    def __init__(self, message: str, *, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        super().__init__(message)
        self.kind = kind


class InvalidTransition(PdserveError):
    """A request was asked to make a move that the state table does not allow."""


class PoolCorrupted(PdserveError):
    """The block pool's reference counts, free list and hash index contradict each other."""


class LinkError(PdserveError):
    """A link to another process failed."""


class MalformedMessage(LinkError):
    """Bytes arrived that are not a message of this link."""


class HandshakeRefused(LinkError):
    """The peer serves another model, layout or protocol version."""
