"""How a node moves KV: frozen, checked, flags derived from the fields."""

import math
from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

LoadMode = Literal["async", "sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Time limits and bounds of KV transfer. All times in seconds."""

    transport: Literal["auto", "shm", "zmq"] = "auto"
    """How KV travels. auto: the best that a pair can do, found at its handshake. shm: shared memory, or no pair at all.
    zmq: messages over TCP."""
    load_mode: LoadMode = "async"
    """async: other requests run while KV arrives. sync: the forward starts at once and waits before each layer."""
    remote_prefill_threshold: int = 16
    """Fewer prompt tokens than this beyond the local prefix hit are computed on the decode node itself."""
    fallback: Literal["local", "fail"] = "local"
    """When no prefill node is ready: compute the prompt on the decode node, or end the request in an error."""
    early_admission: bool = True
    """Let a request run while its last layers are still arriving, if no step would wait for them too long."""
    max_barrier_stall: float = 0.005
    """The longest that an early request may be expected to hold up a step, in seconds."""
    lease_seconds: float = 30.0
    """How long KV is held for a second leg that shows no sign of life."""
    heartbeat_interval: float = 1.0
    """Between two signs of life on a link."""
    peer_timeout: float = 5.0
    """Silence after which a peer counts as lost."""
    transfer_timeout: float = 30.0
    """Time without any progress after which a transfer has failed; a queue that moves is progress."""
    credit_bytes: int = 8 << 20
    """KV bytes under way to this node from one peer at a time. Words that overtake KV, such as the first token, wait
    behind no more than this."""
    digest: bool = True
    """Check a digest of every piece of KV that arrives as a message. The decode node's word counts: its prefill nodes
    compute what it checks."""
    max_peers: int = 64
    """Peers accepted at once."""

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_interval",
            "peer_timeout",
            "transfer_timeout",
            "lease_seconds",
            "credit_bytes",
            "max_peers",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {getattr(self, name)}")
        for name in ("remote_prefill_threshold", "max_barrier_stall"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(self, name)}")
        if self.peer_timeout <= self.heartbeat_interval:
            raise ConfigError(
                f"--peer-timeout must be longer than --heartbeat-interval ({self.heartbeat_interval}), "
                f"got {self.peer_timeout}"
            )
