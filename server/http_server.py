"""Runs the application: binds first, tells when it listens, stops in order.

bind --> load, dial nodes --> on_listening --> serve --> signal --> stop accepting --> drain --> close
"""

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from engine.errors import ConfigError
from server.http_protocol import HttpProtocol
from server.http_settings import LimitsConfig

BACKLOG = 2048
CANCEL_AFTER_SECONDS = 1
"""Once drained, how long responses may still take to be written to clients that do not read."""

NUM_TURNS_TO_CLOSE = 10
"""Turns of the event loop in which an aborted connection tells that it is gone."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` naming the flag and the address.

    It listens at once: two sockets of which none listens yet can be bound to one port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn, with our own order of shutting down and an exit code of 0 after a signal."""

    def __init__(
        self,
        app: FastAPI,
        *,
        drain: Callable[[], Awaitable[None]],
        on_listening: Callable[[], None],
        limits: LimitsConfig | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        limits = limits or LimitsConfig()
        config = uvicorn.Config(
            app,
            http=HttpProtocol.with_limits(limits),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
            timeout_graceful_shutdown=CANCEL_AFTER_SECONDS,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._drain = drain
        self._on_listening = on_listening

    def stop(self) -> None:
        """As a signal would. From any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._drain()
        await super().shutdown(sockets)
        await self._abort_connections()

    async def _abort_connections(self) -> None:
        """Those that are left. A TLS connection is closed only when its client agrees, which an idle one does not."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for _ in range(NUM_TURNS_TO_CLOSE):
            if not self.server_state.connections:
                break
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, which would turn a clean stop into death by signal.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
