"""Where converted models are kept, each made once: whole or absent, whoever is killed and however many start at once.

models/NAME             a finished model; appears by one rename
models/.NAME.partial    being made, by the holder of the lock; left behind by a kill, removed by the next maker
models/.NAME.lock       held with flock while NAME is made, so the kernel frees it when its holder dies
"""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ConfigError
from engine.progress import say

STALL_SECONDS = 600.0
"""How long to wait for another process that makes no progress."""

_POLL_SECONDS = 0.2


def cache_root() -> Path:
    """$PDSERVE_CACHE, or `pdserve` in the user's cache directory."""
    chosen = os.environ.get("PDSERVE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pdserve"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "pdserve"


def cached_model(name: str) -> Path | None:
    """The finished model's directory, or None."""
    path = _models() / name
    return path if path.is_dir() else None


def make_once(name: str, make: Callable[[Path], None], *, stall_seconds: float = STALL_SECONDS) -> Path:
    """The directory `name` of the cache, made by `make(directory)` unless it is there already.

    Waits while another process makes it. Raises `ConfigError` where the cache cannot be written, or where the other
    process shows no progress for `stall_seconds`; passes on what `make` raises, leaving nothing behind.
    """
    finished = cached_model(name)
    if finished is not None:
        return finished
    try:
        with _lock(name, stall_seconds):
            return cached_model(name) or _make(name, make)
    except OSError as error:
        raise ConfigError(f"--model: cannot make {name} in {_models()} (PDSERVE_CACHE moves it): {error}") from error


def _models() -> Path:
    return cache_root() / "models"


def _partial(name: str) -> Path:
    return _models() / f".{name}.partial"


def _make(name: str, make: Callable[[Path], None]) -> Path:
    """Called with the lock held, so a partial directory that exists has no living maker."""
    partial, finished = _partial(name), _models() / name
    _remove(partial)
    partial.mkdir()
    try:
        make(partial)
        os.rename(partial, finished)
    except BaseException:
        _remove(partial)
        raise
    return finished


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


@contextmanager
def _lock(name: str, stall_seconds: float) -> Iterator[None]:
    _models().mkdir(parents=True, exist_ok=True)
    # Never unlinked: a process that opened the old file would then not exclude one that made a new one.
    with open(_models() / f".{name}.lock", "w") as handle:
        _wait_for_lock(handle.fileno(), name, stall_seconds)
        yield


def _wait_for_lock(lock_fd: int, name: str, stall_seconds: float) -> None:
    """flock knows no deadline, so it is tried until it succeeds; bytes written by its holder put the deadline off."""
    seen = -1
    deadline = 0.0
    while not _try_lock(lock_fd):
        num_bytes = _bytes_so_far(_partial(name))
        if seen < 0:
            say(f"{name}: another process is making it, waiting")
        if num_bytes != seen:
            seen, deadline = num_bytes, time.monotonic() + stall_seconds
        if time.monotonic() >= deadline:
            raise ConfigError(f"--model: another process holds {name} and made no progress for {stall_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)


def _try_lock(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bytes_so_far(directory: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                num_bytes += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # its maker has just renamed or removed it
                continue
    return num_bytes
