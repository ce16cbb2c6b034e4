"""Settings of `pdserve up`: what somebody on one machine changes of the ring's processes, and the launcher's own."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from connector.transfer_settings import TransferSettings
from engine.config import CacheConfig, DType, ModelOptions, SchedulerConfig
from engine.errors import ConfigError
from server.chat_settings import ChatConfig
from server.http_settings import AccessConfig, CorsConfig, LimitsConfig, TlsConfig

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Starts a ring on this machine: prefill nodes, decode nodes, and the server in front."""

    model: str = "smollm2-135m"
    """Built-in name, a transformers-format directory, a Hugging Face id, or a .gguf file."""
    dtype: DType = "auto"
    """Type of weights, activations and KV. auto: float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. Default: what model and KV cache allow."""
    prefill_nodes: int = 1
    """Number of prefill nodes. 0: the decode nodes compute their prompts themselves."""
    decode_nodes: int = 1
    """Number of decode nodes."""
    host: str = "127.0.0.1"
    """Interface of the HTTP server. The nodes always stay on loopback."""
    port: int = 8000
    """Port of the HTTP server; 0 picks a free one."""
    served_model_name: tuple[str, ...] = ()
    """Name that clients use; repeat for aliases. Default: the text of --model."""
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    cors: CorsConfig = field(default_factory=CorsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    num_threads: int | None = None
    """Threads of each node. Default: as many as it has CPUs."""
    pin_cpus: bool = True
    """Give each node CPUs of its own, if there are enough."""
    ready_file: Path | None = None
    """Written once the ring is ready: JSON with the URL and the processes."""
    start_timeout: float = 300.0
    """Seconds until the ring must be ready. The model is fetched before that."""
    debug_state: bool = False
    """Serve /debug/state on the nodes' admin endpoints."""
    log_level: LogLevel = "info"
    """Least severe messages that the processes print."""

    def __post_init__(self) -> None:
        _require(self.prefill_nodes >= 0, "--prefill-nodes", "must be >= 0", self.prefill_nodes)
        _require(self.decode_nodes >= 1, "--decode-nodes", "must be at least 1", self.decode_nodes)
        _require(0 <= self.port <= 65535, "--port", "must be in [0, 65535]", self.port)
        _require(self.tls.ssl_ca_certs is None, "--ssl-ca-certs", "is for pdserve server alone", self.tls.ssl_ca_certs)
        if self.ready_file is not None:
            directory = self.ready_file.absolute().parent
            _require(
                os.access(directory, os.W_OK), "--ready-file", "must be in a directory that can be written", directory
            )
        _require(self.start_timeout > 0, "--start-timeout", "must be > 0", self.start_timeout)
        _require(
            self.num_threads is None or self.num_threads >= 1, "--num-threads", "must be at least 1", self.num_threads
        )

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(model=self.model, dtype=self.dtype, max_model_len=self.max_model_len)


def _require(holds: bool, flag: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{flag} {rule}, got {value}")
