"""A GGUF file as typed metadata and float32 tensors. The format: ggml's docs/gguf.md. Torch-free."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, UnsupportedModelError


class GgufFile:
    """Read-only view of one file; tensors stay memory-mapped until they are asked for.

    Raises `ConfigError` naming --model where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.require("general.architecture"))
        if int(self.get("split.count", 1)) > 1:
            raise UnsupportedModelError(
                f"--model: {path} is one part of several (split.count); join them with llama-gguf-split --merge"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value, or `default` where the key is absent."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value. Raises `ConfigError` where the key is absent."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"--model: {self.path} lacks the metadata {key}")
        return value

    def get_of_architecture(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def require_of_architecture(self, key: str) -> Any:
        return self.require(f"{self.architecture}.{key}")

    @property
    def tensor_names(self) -> Sequence[str]:
        """In file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape with the slowest dimension first, as numpy and torch have it; GGUF stores the reverse."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The dequantised tensor."""
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"--model: {self.path}: {name} is {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error
        # A big-endian file is read in its own byte order; the checkpoint is written in the machine's.
        return np.ascontiguousarray(values.reshape(self.shape(name)), dtype=np.float32)


def _open(path: Path) -> gguf.GGUFReader:
    # The reader trusts the file: on a short or damaged one, its slicing and reshaping fail in these ways.
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"--model: {path} is not a readable GGUF file: {error}") from error
    except OSError as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from error
