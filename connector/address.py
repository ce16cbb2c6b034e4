"""Addresses of links, checked before anything is bound or dialled."""

import re

from engine.errors import ConfigError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def check_tcp_address(flag: str, address: str) -> None:
    """Raises `ConfigError` naming `flag` unless `address` is tcp://HOST:PORT; an IPv6 host stands in brackets."""
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{flag} must look like tcp://HOST:PORT, with a port up to 65535, got {address}")
