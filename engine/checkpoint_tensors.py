"""The safetensors files of a transformers-format directory: one file, or shards listed by an index. No pickle.

A file is 8 bytes of header length (little endian), the header as JSON (name: dtype, shape, offsets), then the bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.json_fields import JsonFields

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_SAMPLE_BYTES = 1024


class CheckpointTensors:
    """Tensors by name, memory-mapped. A context manager: the maps are let go at its end.

    Raises `ConfigError` naming the file if one is missing or damaged, or if two hold the same tensor.
    """

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        with self._stack, ExitStack() as opened:
            for path in safetensors_files(directory):
                self._open(path, opened)
            self._stack = opened.pop_all()

    def _open(self, path: Path, opened: ExitStack) -> None:
        with _damage_named(path):
            file = opened.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self._file_of:
                    raise ConfigError(f"{path} holds {name}, which another file of the checkpoint holds too")
                self._file_of[name] = file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._stack.close()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def safetensors_files(directory: Path) -> list[Path]:
    """The checkpoint's files, as transformers would choose them. Raises `ConfigError` if there is none."""
    single = directory / _SINGLE_FILE
    if single.exists():
        return [single]
    index = directory / _INDEX_FILE
    if not index.exists():
        raise ConfigError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    shards = sorted({str(shard) for shard in JsonFields.read(index).object("weight_map").values.values()})
    for shard in shards:
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise ConfigError(f"{index} lists {shard}, which is not a file of the checkpoint")
    return [directory / shard for shard in shards]


def weights_digest(directory: Path) -> str:
    """sha256 that tells weights apart without reading them all.

    Covers each tensor's name, type and shape, and 1 KiB from its start, its middle and its end. It does not depend on
    how tensors are spread over files. A change elsewhere inside a tensor goes unnoticed: the digest is for telling
    checkpoints apart, not for proving a file intact.
    """
    samples = {}
    for path in safetensors_files(directory):
        with _damage_named(path):
            samples.update(_sample_tensors(path))
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()


def _sample_tensors(path: Path) -> dict[str, bytes]:
    """For each tensor of a file 32 bytes that stand for it."""
    samples = {}
    with safe_open(path, framework="pt"):
        pass  # the format's own reader says best what is wrong with a header; below it is taken to be right
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            for offset in _sample_offsets(begin, end):
                file.seek(8 + length + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
            samples[name] = digest.digest()
    return samples


def _sample_offsets(begin: int, end: int) -> tuple[int, int, int]:
    last = max(begin, end - _SAMPLE_BYTES)
    return begin, (begin + last) // 2, last


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Translates what a missing or damaged file raises."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
