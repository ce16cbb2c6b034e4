"""The files are those of the safetensors library, byte for byte where the order of the tensors is the same."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from engine.safetensors_writer import write_safetensors

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.bias": np.array([np.inf, -0.0, 1e-40], dtype=np.float32),
    "c": np.zeros((2, 0, 3), dtype=np.float32),
    "d": np.full((), 7, dtype=np.float32),
}


def write(path, tensors):
    write_safetensors(path, {name: values.shape for name, values in tensors.items()}, tensors.__getitem__)
    return path


def test_the_library_reads_what_is_written(tmp_path):
    path = write(tmp_path / "m.safetensors", TENSORS)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], values)
        assert loaded[name].dtype == np.float32
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_bytes_are_those_of_the_library(tmp_path):
    path = write(tmp_path / "m.safetensors", TENSORS)
    assert path.read_bytes() == save(TENSORS, metadata={"format": "pt"})


def test_tensors_need_not_be_contiguous(tmp_path):
    values = TENSORS["a.weight"].T
    path = write(tmp_path / "m.safetensors", {"t": values})
    np.testing.assert_array_equal(load_file(path)["t"], values)


def test_a_tensor_of_another_shape_is_a_bug(tmp_path):
    with pytest.raises(AssertionError, match="announced"):
        write_safetensors(tmp_path / "m.safetensors", {"t": (3,)}, lambda name: np.zeros(4, np.float32))
