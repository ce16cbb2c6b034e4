"""Settings of what surrounds the answers: who may ask, over what, how much at once. `pdserve up` has them too."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/\s,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may ask. More keys may come from the environment; see `api_keys`."""

    # What is not in the repr is secret, and is never written into an argv: see `engine.flags.to_flags`.
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that clients must send as a bearer token; repeat for more. Others on this machine can see flags: prefer
    --api-key-file or the environment variable PDSERVE_API_KEY."""
    api_key_file: Path | None = None
    """File with one API key on each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM format."""

    ssl_certfile: Path | None = None
    """Certificate (chain) to serve HTTPS with."""
    ssl_keyfile: Path | None = None
    """Its private key, not encrypted."""
    ssl_ca_certs: Path | None = None
    """Clients must present a certificate signed by one of these."""

    def __post_init__(self) -> None:
        _require(
            (self.ssl_certfile is None) == (self.ssl_keyfile is None),
            "--ssl-certfile and --ssl-keyfile",
            "must be given together",
            self.ssl_certfile or self.ssl_keyfile,
        )
        _require(
            self.ssl_ca_certs is None or self.ssl_certfile is not None,
            "--ssl-ca-certs",
            "needs --ssl-certfile",
            self.ssl_ca_certs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsConfig:
    """Which web pages may ask from a browser. None by default."""

    allowed_origins: tuple[str, ...] = ()
    """Origin such as https://chat.example.org, or * for all; repeat for more."""
    allowed_methods: tuple[str, ...] = ()
    """Method that pages may use; repeat for more. Default: all."""
    allowed_headers: tuple[str, ...] = ()
    """Header that pages may send; repeat for more. Default: all."""
    allow_credentials: bool = False
    """Let browsers send cookies along."""

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            _require(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                "--allowed-origins",
                "must be * or look like https://host",
                origin,
            )
        others = {
            "--allowed-methods": self.allowed_methods,
            "--allowed-headers": self.allowed_headers,
            "--allow-credentials": self.allow_credentials,
        }
        for flag, value in others.items():
            _require(not value or bool(self.allowed_origins), flag, "needs --allowed-origins", value)
        _require(
            not (self.allow_credentials and "*" in self.allowed_origins),
            "--allow-credentials",
            "needs --allowed-origins by name",
            "*",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """How much clients may send and ask for. Durations are in seconds."""

    max_in_flight: int | None = None
    """Most sequences (prompts times n) under way at once; what is over it is refused with 429. Default: four times as
    many as the nodes run at once, and at least 256 for each."""
    max_body_bytes: int = 16 << 20
    """Longest request body accepted."""
    max_header_bytes: int = 32 << 10
    """Longest request line and headers accepted."""
    receive_timeout: float = 60.0
    """Longest time for a request to arrive, head and body."""
    request_timeout: float = 600.0
    """Longest time from a request's arrival to its last token."""
    keep_alive_timeout: float = 75.0
    """How long a connection may be idle between two requests."""

    def __post_init__(self) -> None:
        _require(
            self.max_in_flight is None or self.max_in_flight >= 1,
            "--max-in-flight",
            "must be at least 1",
            self.max_in_flight,
        )
        _require(self.max_body_bytes >= 1, "--max-body-bytes", "must be at least 1", self.max_body_bytes)
        _require(self.max_header_bytes >= 1024, "--max-header-bytes", "must be at least 1024", self.max_header_bytes)
        for name in ("receive_timeout", "request_timeout", "keep_alive_timeout"):
            _require(getattr(self, name) > 0, "--" + name.replace("_", "-"), "must be > 0", getattr(self, name))


def _require(holds: bool, flag: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{flag} {rule}, got {value}")
