"""KV memory that another process on this host may write into.

The memory is an anonymous file (`memfd_create`): it has no name, so nothing is left behind however the process ends.
A peer on the same host reaches it as `/proc/<pid>/fd/<fd>` and proves that it found the right memory by the nonce that
stands behind the KV. Where that is not possible (another host, another user, another pid namespace, not Linux), the
pair uses the message transport.

    0 ................ num_bytes ...... + NONCE_BYTES
    | layer 0 | layer 1 | ... | nonce |
"""

import mmap
import os
import secrets
import select
import weakref
from collections.abc import Sequence

import torch

from connector.peer_messages import SharedMemoryOffer
from engine.errors import ConfigError, LinkError

NONCE_BYTES = 16


def is_available() -> bool:
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class SharedKVMemory:
    """Our own KV memory, on offer to peers."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._fd = os.memfd_create("pdserve-kv")
        try:
            os.ftruncate(self._fd, num_bytes + NONCE_BYTES)
            self._map = mmap.mmap(self._fd, num_bytes + NONCE_BYTES)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise ConfigError(f"--kv-cache-bytes: cannot map {num_bytes} bytes of shared memory: {error}") from error
        self._map[num_bytes:] = self._nonce

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)[: self.num_bytes]

    def offer(self, num_blocks: int) -> SharedMemoryOffer:
        return SharedMemoryOffer(
            pid=os.getpid(), fd=self._fd, num_bytes=self.num_bytes, num_blocks=num_blocks, nonce=self._nonce
        )

    def close(self) -> None:
        """The mapping itself goes with the last tensor that views it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PeerKVMemory:
    """A peer's KV memory, mapped for writing. Raises `LinkError` if it is not reachable from here."""

    def __init__(self, offer: SharedMemoryOffer, like: Sequence[torch.Tensor]) -> None:
        self._map = _map_offer(offer)
        shape = (offer.num_blocks, *like[0].shape[1:])
        layer_bytes = offer.num_bytes // len(like)
        if layer_bytes * len(like) != offer.num_bytes or layer_bytes != _num_bytes(shape, like[0].dtype):
            raise LinkError("the offered memory does not hold the layers it should")
        self.kv_caches = [
            torch.frombuffer(
                self._map, dtype=cache.dtype, count=layer_bytes // cache.element_size(), offset=layer * layer_bytes
            ).view(shape)
            for layer, cache in enumerate(like)
        ]


class PeerProcess:
    """Tells whether a process on this host has ended, also if its pid was used again since."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise LinkError(f"cannot watch process {pid}: {error}") from error
        # Several transfers may wait for one process: the last to forget it closes the handle.
        self._close = weakref.finalize(self, os.close, self._fd)

    def has_ended(self, within: float = 0.0) -> bool:
        """Waits at most `within` seconds for it."""
        readable, _, _ = select.select([self._fd], [], [], within)
        return bool(readable)

    def close(self) -> None:
        self._close()


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize


def _map_offer(offer: SharedMemoryOffer) -> mmap.mmap:
    size = offer.num_bytes + NONCE_BYTES
    try:
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                raise LinkError("the offered memory has another size")
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise LinkError(f"the offered memory cannot be mapped: {error}") from error
    if mapped[offer.num_bytes :] != offer.nonce:
        raise LinkError("the offered memory is somebody else's")
    return mapped
