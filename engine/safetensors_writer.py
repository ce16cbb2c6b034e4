"""Writes a float32 .safetensors file one tensor at a time.

The format (huggingface/safetensors, "Format"): eight bytes with the header's length, little-endian; the header, JSON,
padded with spaces; then the tensors' bytes without gaps. It is written here rather than by the library because the
library wants all tensors in memory at once, and because the server, which may be the one to convert a model, must not
load it.
"""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_FLOAT32 = np.dtype("<f4")


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], NDArray[np.float32]]
) -> None:
    """`tensor(name)` is called once for each name of `shapes`, in that order, and must have the shape given there."""
    with open(path, "wb") as file:
        header = _header(shapes)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, shape in shapes.items():
            values = np.asarray(tensor(name), dtype=_FLOAT32, order="C")
            assert values.shape == shape, f"{name} has the shape {values.shape}, announced was {shape}"
            file.write(values.data)


def num_bytes(shape: tuple[int, ...]) -> int:
    return prod(shape) * _FLOAT32.itemsize


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    # transformers 4 refuses a file that does not say which framework's layout it has.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + num_bytes(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)
