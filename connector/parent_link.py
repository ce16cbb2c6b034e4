"""The link between a process and the launcher that started it: one socket pair, inherited by number.

child  -> parent   one JSON line once it listens: where
parent -> child    nothing; that it ends tells the child that its launcher is gone, however it died
"""

import json
import os
import threading
from collections.abc import Callable, Mapping

from engine.errors import ConfigError


class ParentLink:
    """The child's end. Raises `ConfigError` if `fd` is not open."""

    def __init__(self, fd: int) -> None:
        try:
            os.fstat(fd)
        except OSError as error:
            raise ConfigError(f"--parent-fd {fd} is not an open file descriptor: {error}") from error
        self._fd = fd
        os.set_inheritable(fd, False)

    def announce(self, where: Mapping[str, object]) -> None:
        """Says where this process can be reached. A parent that is gone already is noticed by `watch`."""
        line = json.dumps({"pid": os.getpid(), **where}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except BrokenPipeError:
            return

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` from another thread once the parent is gone."""
        threading.Thread(target=self._wait, args=(on_gone,), name="parent", daemon=True).start()

    def _wait(self, on_gone: Callable[[], None]) -> None:
        while True:
            try:
                if not os.read(self._fd, 1):
                    break
            except ConnectionResetError:
                break
        on_gone()
