"""A node's settings. Flags are derived from these fields; the two roles differ by the addresses they need."""

import os
from dataclasses import dataclass, field
from typing import Literal

from connector.transfer_settings import TransferSettings
from engine.config import CacheConfig, EngineConfig, ModelOptions, SchedulerConfig
from engine.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What both roles have in common."""

    model: ModelOptions
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    name: str | None = None
    """Name in logs, metrics and messages; unique in the deployment. Default: role, host, port and pid."""
    admin_host: str = "127.0.0.1"
    """Interface of the admin endpoint (/health, /ready, /metrics)."""
    kv_connector: str = "p2p"
    """How KV crosses between nodes: a registered name, or module:callable."""
    server_timeout: float = 10.0
    """Seconds of silence after which a server counts as lost and its requests are dropped."""
    drain_timeout: float = 5.0
    """Seconds that requests and transfers under way may take to end after SIGTERM."""
    num_threads: int | None = None
    """Threads for the model's arithmetic. Default: one for each CPU the process may use."""
    cpus: tuple[int, ...] = ()
    """CPUs to run on. Default: all that the process may use."""
    debug_state: bool = False
    """Serve /debug/state on the admin endpoint."""
    log_level: LogLevel = "info"
    """Least severe messages to print."""
    parent_fd: int | None = None
    """Set by the launcher: a socket on which to say where we listen, and whose end means that the launcher is gone."""

    def __post_init__(self) -> None:
        if self.drain_timeout < 0:
            raise ConfigError(f"--drain-timeout must be >= 0, got {self.drain_timeout}")
        if self.server_timeout <= 0:
            raise ConfigError(f"--server-timeout must be > 0, got {self.server_timeout}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"--num-threads must be at least 1, got {self.num_threads}")
        if self.cpus and hasattr(os, "sched_getaffinity"):
            missing = sorted(set(self.cpus) - os.sched_getaffinity(0))
            if missing:
                raise ConfigError(f"--cpus names CPUs that this process may not use: {missing}")

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(model=self.model, cache=self.cache, scheduler=self.scheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNodeConfig(NodeConfig):
    """A node that computes prompts and ships their KV."""

    listen: str = "tcp://127.0.0.1:7100"
    """Where servers reach this node; port 0 picks a free one."""
    kv_listen: str = "tcp://127.0.0.1:7101"
    """Where decode nodes reach this node; port 0 picks a free one."""
    admin_port: int = 7102
    """Port of the admin endpoint; 0 picks a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeConfig(NodeConfig):
    """A node that generates, with prompts computed by its prefill nodes."""

    listen: str = "tcp://127.0.0.1:7200"
    """Where servers reach this node; port 0 picks a free one."""
    prefill: tuple[str, ...] = ()
    """KV address of a prefill node (its --kv-listen). Without any, this node computes prompts itself."""
    kv_listen: str | None = None
    """Where other nodes fetch KV that this one was asked to hold, such as tcp://127.0.0.1:7201. Without it, it holds
    none."""
    admin_port: int = 7202
    """Port of the admin endpoint; 0 picks a free one."""
