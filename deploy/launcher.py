"""`pdserve up`: a ring of processes on this machine, from the first to the last.

  fetch the model -> prefill nodes, decode nodes, server -> wait for /ready -> ready line -> watch
                                                                                             |
             exit <- SIGKILL what is left <- SIGTERM to the nodes <- SIGTERM to the server <-+  Ctrl-C, or a child ended

Addresses go along the arrows of the ring: a decode node is told the prefill nodes', the server is told everybody's.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from connector.node_config import NodeConfig
from deploy.child import Child
from deploy.ring_plan import (
    decode_config,
    node_environment,
    plan_cpus,
    prefill_config,
    server_config,
    server_environment,
)
from deploy.up_config import UpConfig
from engine.errors import ConfigError
from engine.flags import to_flags
from engine.model_source import resolve_model
from server.api_keys import ENVIRONMENT_VARIABLE, read_api_keys
from server.tls import tls_context

STOP_SERVER_SECONDS = 3.5
"""The server ends its streams within its own --shutdown-timeout; then the nodes have nothing left to do."""
STOP_NODES_SECONDS = 1.0
READY_POLL_SECONDS = 0.1
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Launcher:
    """One ring. `run` returns the exit code."""

    def __init__(self, config: UpConfig, console: Console, *, needs_key: bool = False) -> None:
        self._config = config
        self._needs_key = needs_key
        self._console = console
        self._nodes: list[Child] = []
        self._server: Child | None = None
        self._colours: dict[str, str] = {}
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        self._remove_ready_file()
        try:
            if await self._or_stopped(self._start()):
                return await self._watch()
            return 0
        finally:
            self._remove_ready_file()
            await self._stop_all()

    @property
    def _children(self) -> list[Child]:
        return [*self._nodes, *([self._server] if self._server is not None else [])]

    # Start

    async def _start(self) -> None:
        config = self._config
        try:
            async with asyncio.timeout(config.start_timeout):
                with self._console.status(f"starting {config.model}: nodes load the model") as status:
                    await self._start_processes()
                    status.update("waiting until the ring is ready")
                    await self._wait_until_ready()
        except TimeoutError:
            raise ConfigError(f"--start-timeout: not ready after {config.start_timeout:g} s") from None
        self._write_ready_file()
        self._print_ready()

    async def _start_processes(self) -> None:
        config = self._config
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        num_nodes = config.prefill_nodes + config.decode_nodes
        shares = plan_cpus(num_nodes, available if config.pin_cpus else [])
        prefill = [prefill_config(config, i, shares[i]) for i in range(config.prefill_nodes)]
        kv_addresses = [where["kv_address"] for where in await self._start_nodes("prefill", prefill)]
        decode = [
            decode_config(config, i, shares[config.prefill_nodes + i], kv_addresses) for i in range(config.decode_nodes)
        ]
        await self._start_nodes("decode", decode)
        addresses = {child.name: str(child.where["address"]) for child in self._nodes}
        server = server_config(
            config,
            prefill=[addresses[str(node.name)] for node in prefill],
            decode=[addresses[str(node.name)] for node in decode],
        )
        self._server = Child("server", "server", to_flags(server), self._print_line)
        await self._server.start("server", server_environment(config, os.environ))
        await self._server.announced()

    async def _start_nodes(self, role: str, configs: Sequence[NodeConfig]) -> list[Mapping[str, Any]]:
        """What each announced, in order."""
        children = [Child(role, str(config.name), to_flags(config), self._print_line) for config in configs]
        self._nodes += children
        for child in children:
            await child.start(f"{role}_node", node_environment(os.environ))
        return await asyncio.gather(*(child.announced() for child in children))

    async def _wait_until_ready(self) -> None:
        assert self._server is not None
        gone = [asyncio.create_task(child.ended()) for child in self._children]
        try:
            while not await _is_ready(str(self._server.where["url"])):
                done, _ = await asyncio.wait(gone, timeout=READY_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    raise ConfigError(await self._children[gone.index(done.pop())].obituary())
        finally:
            for task in gone:
                task.cancel()

    # Watch and stop

    async def _watch(self) -> int:
        """Until told to stop (0) or a child ends (1)."""
        endings = {asyncio.create_task(child.ended()): child for child in self._children}
        stop = asyncio.create_task(self._stop.wait())
        done, pending = await asyncio.wait([*endings, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done - {stop}:
            self._console.print(f"[red]{escape(await endings[task].obituary())}[/]", highlight=False, soft_wrap=True)
        return 0 if stop in done else 1

    async def _or_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work`; False if Ctrl-C came first."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return False
        stop.cancel()
        await task
        return True

    async def _stop_all(self) -> None:
        """The server first, so that no request meets a node that is going."""
        await _end([self._server] if self._server is not None else [], STOP_SERVER_SECONDS)
        await _end(self._nodes, STOP_NODES_SECONDS)
        for child in self._children:
            child.close()

    # Words

    def _print_line(self, name: str, line: str) -> None:
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        self._console.print(f"[{colour}]{name:>10} |[/] {escape(line)}", highlight=False, soft_wrap=True)

    def _print_ready(self) -> None:
        assert self._server is not None
        url = self._server.where["url"]
        model = (self._config.served_model_name or (self._config.model,))[0]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = json.dumps({"model": model, "temperature": 0, "messages": question})
        self._console.print(f"[bold green]ready[/] at {url} - try:", highlight=False)
        key = " -H 'Authorization: Bearer KEY'" if self._needs_key else ""
        trust = f" --cacert {self._config.tls.ssl_certfile}" if self._config.tls.ssl_certfile else ""
        command = f"curl{trust}{key} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        self._console.print(escape(command), highlight=False, soft_wrap=True)

    def _remove_ready_file(self) -> None:
        """It is there while the ring is ready, and names no processes of another time."""
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)

    def _write_ready_file(self) -> None:
        """Whole or not at all: scripts wait for it to appear."""
        path = self._config.ready_file
        if path is None or self._server is None:
            return
        processes = [
            {"role": c.role, "name": c.name, "pid": c.pid, "admin_url": c.where.get("admin_url") or c.where["url"]}
            for c in self._children
        ]
        content = json.dumps({"url": self._server.where["url"], "processes": processes}, indent=2)
        _write_whole(path, content + "\n")


async def _end(children: Sequence[Child], seconds: float) -> None:
    """SIGTERM, and SIGKILL to those that take longer than `seconds`."""
    started = [child for child in children if child.process is not None]
    for child in started:
        child.terminate()
    if not started:
        return
    _, late = await asyncio.wait([asyncio.create_task(child.ended()) for child in started], timeout=seconds)
    if late:
        for child in started:
            child.kill()
        await asyncio.wait(late)


def _any_certificate() -> ssl.SSLContext:
    """To a child of ours, on the port that it announced: names and dates of its certificate do not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _is_ready(url: str) -> bool:
    """Whether GET /ready answers 200."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        reader, writer = await asyncio.open_connection(
            host, parts.port, ssl=_any_certificate() if parts.scheme == "https" else None
        )
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()
    except OSError:
        return False
    return status.split()[1:2] == [b"200"]


def _write_whole(path: Path, content: str) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(fd, "w") as file:
        file.write(content)
    os.replace(temporary, path)


def check_port(host: str, port: int) -> None:
    """Raises `ConfigError` naming --port before anything is started, if it is taken."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--port: cannot listen on {host}:{port}: {error}") from error


def run_up(config: UpConfig) -> int:
    """Fetches the model where needed, then runs the ring until Ctrl-C. The exit code."""
    check_port(config.host, config.port)
    needs_key = bool(read_api_keys(config.access, os.environ.get(ENVIRONMENT_VARIABLE, "")))
    tls_context(config.tls)
    resolve_model(config.model)
    return asyncio.run(Launcher(config, Console(), needs_key=needs_key).run())
