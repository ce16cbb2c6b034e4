"""The certificate that the server shows, read before anything starts."""

import ssl
from pathlib import Path

from engine.errors import ConfigError
from server.http_settings import TlsConfig


def tls_context(config: TlsConfig) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises `ConfigError` naming the flag and the file."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        _check_readable(flag, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With no password given OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except ssl.SSLError as error:
        raise ConfigError(_why(error, config)) from error
    if config.ssl_ca_certs is not None:
        _require_client_certificate(context, config.ssl_ca_certs)
    return context


def _require_client_certificate(context: ssl.SSLContext, authorities: Path) -> None:
    _check_readable("--ssl-ca-certs", authorities)
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-ca-certs: {authorities} holds no certificate in PEM format") from error
    context.verify_mode = ssl.CERT_REQUIRED


def _check_readable(flag: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error


def _why(error: ssl.SSLError, config: TlsConfig) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--ssl-keyfile: {config.ssl_keyfile} is not the key of {config.ssl_certfile}"
    if b"-----BEGIN CERTIFICATE-----" not in config.ssl_certfile.read_bytes():  # type: ignore[union-attr]
        return f"--ssl-certfile: {config.ssl_certfile} holds no certificate in PEM format"
    return f"--ssl-keyfile: {config.ssl_keyfile} is no unencrypted private key in PEM format ({error.reason or error})"
