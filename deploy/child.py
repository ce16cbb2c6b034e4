"""One process of the ring as the launcher sees it: started, heard, watched, stopped."""

import asyncio
import json
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

NUM_LAST_LINES = 8
MAX_LINE_BYTES = 1 << 24


@dataclass(slots=True, eq=False)
class Child:
    """`role` is also the package that is run. `where` is what the child announced."""

    role: str
    name: str
    argv: Sequence[str]
    print_line: Callable[[str, str], None]
    """Called with the name and one line of the child's output."""
    process: Process | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    _parent_socket: socket.socket | None = None
    _reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, module: str, environment: Mapping[str, str]) -> None:
        """Starts `python -m module argv`. It gets its own session: Ctrl-C reaches the launcher alone, which stops it
        in order; and it ends by itself when the launcher's end of the socket closes, however the launcher died."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module, *self.argv, "--parent-fd", str(theirs.fileno())),
                limit=MAX_LINE_BYTES,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self._parent_socket = ours
        self._reader = asyncio.create_task(self._forward_output(self.process))

    async def announced(self) -> Mapping[str, Any]:
        """What the child says once it listens. Raises `ConfigError` with its last words if it ends before."""
        assert self._parent_socket is not None
        self._parent_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        line = b""
        while not line.endswith(b"\n"):
            part = await loop.sock_recv(self._parent_socket, 65536)
            if not part:
                raise ConfigError(await self.obituary())
            line += part
        self.where = json.loads(line)
        return self.where

    async def ended(self) -> int:
        """The exit status; negative for a signal. All output was forwarded by then."""
        assert self.process is not None
        assert self._reader is not None
        status = await self.process.wait()
        await self._reader
        return status

    async def obituary(self) -> str:
        """Which child ended, how, and the last it said."""
        status = await self.ended()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        words = "".join(f"\n    {line}" for line in self.last_lines)
        return f"{self.name} (pid {self.pid}) {how}" + (f"; its last words:{words}" if words else "")

    def terminate(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def close(self) -> None:
        if self._parent_socket is not None:
            self._parent_socket.close()

    async def _forward_output(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            self.print_line(self.name, text)
