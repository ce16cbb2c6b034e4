"""The server's settings: frozen, checked once, messages that name the flag. Flags are derived from these fields."""

from dataclasses import dataclass, field
from typing import Literal

from connector.address import check_tcp_address
from engine.errors import ConfigError
from server.chat_settings import ChatConfig
from server.http_settings import AccessConfig, CorsConfig, LimitsConfig, TlsConfig

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the HTTP server needs to know. Durations are in seconds."""

    model: str
    """What the nodes serve; only its tokenizer and configs are read here. Same forms as for a node."""
    served_model_name: tuple[str, ...] = ()
    """Name that clients use; repeat for aliases. Default: the text of --model."""
    decode: tuple[str, ...] = ()
    """Decode node to dial, such as tcp://127.0.0.1:7200. Repeat for more; at least one, or --node."""
    prefill: tuple[str, ...] = ()
    """Prefill node to dial. Repeat for more."""
    node: str | None = None
    """A single node of either role to serve, for a router that sends a request's two legs itself. Excludes --decode."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    cors: CorsConfig = field(default_factory=CorsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    heartbeat_interval: float = 1.0
    """Time between two pings of a node."""
    node_timeout: float = 10.0
    """A node silent for this long is lost, and so are its requests."""
    shutdown_timeout: float = 3.0
    """How long running requests may go on after SIGTERM before they are ended with an error."""
    log_level: LogLevel = "info"
    """Least severe messages to log."""
    parent_fd: int | None = None
    """Socket to a launcher: gets one JSON line (url, pid) when the server listens; the server ends when it closes."""

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model", "must not be empty", repr(self.model))
        _require(all(self.served_model_name), "--served-model-name", "must not be empty", self.served_model_name)
        _require(0 <= self.port <= 65535, "--port", "must be in [0, 65535]", self.port)
        self._check_addresses()
        self._check_durations()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use; the first is the one shown when a request names none."""
        return self.served_model_name or (self.model,)

    def _check_addresses(self) -> None:
        node = () if self.node is None else (self.node,)
        _require(bool(self.decode or node), "--decode or --node", "must be given", "neither")
        _require(not node or not (self.decode or self.prefill), "--node", "excludes --decode and --prefill", "both")
        for flag, addresses in (("--decode", self.decode), ("--prefill", self.prefill), ("--node", node)):
            for address in addresses:
                check_tcp_address(flag, address)
        addresses = self.decode + self.prefill
        _require(len(set(addresses)) == len(addresses), "--decode, --prefill", "must name each node once", addresses)

    def _check_durations(self) -> None:
        for name in ("heartbeat_interval", "node_timeout"):
            _require(getattr(self, name) > 0, _flag(name), "must be > 0", getattr(self, name))
        _require(self.shutdown_timeout >= 0, "--shutdown-timeout", "must be >= 0", self.shutdown_timeout)
        _require(
            self.node_timeout > self.heartbeat_interval,
            "--node-timeout",
            f"must be longer than --heartbeat-interval ({self.heartbeat_interval})",
            self.node_timeout,
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(holds: bool, flag: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{flag} {rule}, got {value}")
