"""API keys: where they come from, and which one opens."""

import hmac
import logging
import re
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from engine.errors import ConfigError
from server.http_settings import AccessConfig

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "PDSERVE_API_KEY"
"""One key, or several with white space between them."""
MAX_KEY_LENGTH = 1024

_KEY = re.compile(r"[\x21-\x7e]+")


class ApiKeys:
    """The keys of which one must be sent; everybody may ask if there are none. Holds digests only."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Whether this `Authorization` header opens the door. Takes equally long for every wrong key."""
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def read_api_keys(config: AccessConfig, from_environment: str = "") -> ApiKeys:
    """Raises `ConfigError` naming the source, never the key. What is there but empty is an error, except in the
    environment: a key that got lost on its way must not leave the door open."""
    keys = [_checked(key, "--api-key") for key in config.api_key]
    if config.api_key_file is not None:
        keys += _read_file(config.api_key_file)
    keys += [_checked(key, ENVIRONMENT_VARIABLE) for key in from_environment.split()]
    return ApiKeys(keys)


def _read_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--api-key-file: cannot read {path}: {reason}") from error
    if mode & stat.S_IROTH:
        # Not refused: secrets that an orchestrator mounts have this mode.
        logger.warning("--api-key-file: everybody on this machine can read %s", path)
    lines = [line.strip() for line in text.splitlines()]
    keys = [_checked(line, f"--api-key-file: {path}") for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys


def _checked(key: str, source: str) -> str:
    if len(key) > MAX_KEY_LENGTH or _KEY.fullmatch(key) is None:
        raise ConfigError(f"{source}: a key must be 1 to {MAX_KEY_LENGTH} printable ASCII characters without spaces")
    return key


def _digest(key: bytes) -> bytes:
    # Of equal length, so that a comparison does not tell that of a key.
    return sha256(key).digest()
