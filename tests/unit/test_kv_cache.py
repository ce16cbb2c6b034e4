"""Layout, memory given from outside, and how many blocks fit."""

import mmap
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.kv_cache import KVCache, KVLayout, num_blocks_that_fit, resolve_num_blocks
from tests.unit.conftest import TinyModel

LAYOUT = KVLayout(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_sizes() -> None:
    assert LAYOUT.layer_shape == (5, 2, 4, 2, 8)
    assert LAYOUT.block_bytes == 2 * 4 * 2 * 8 * 2
    assert LAYOUT.total_bytes == 3 * 5 * LAYOUT.block_bytes
    assert LAYOUT.num_tokens == 20


def test_own_memory_is_contiguous_zeros() -> None:
    cache = KVCache.allocate(LAYOUT)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.shape == LAYOUT.layer_shape
        assert layer.dtype is torch.bfloat16
        assert layer.is_contiguous()
        assert not layer.any()


def test_given_memory_holds_layer_after_layer() -> None:
    memory = mmap.mmap(-1, LAYOUT.total_bytes)
    cache = KVCache.allocate(LAYOUT, memory)

    cache.layers[1][2].fill_(1.0)

    start = LAYOUT.layer_bytes + 2 * LAYOUT.block_bytes
    assert memory[:start] == bytes(start)
    assert memory[start : start + LAYOUT.block_bytes] == b"\x80\x3f" * (LAYOUT.block_bytes // 2)
    assert not any(memory[start + LAYOUT.block_bytes :])


def test_given_memory_is_taken_as_it_is() -> None:
    memory = memoryview(bytearray(b"\x80\x3f" * (LAYOUT.total_bytes // 2)))
    assert all((layer == 1.0).all() for layer in KVCache.allocate(LAYOUT, memory).layers)


def test_unusable_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        KVCache.allocate(LAYOUT, memoryview(bytes(LAYOUT.total_bytes)))
    with pytest.raises(ValueError, match=f"{LAYOUT.total_bytes - 1} bytes, {LAYOUT.total_bytes} are needed"):
        KVCache.allocate(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes - 1)))


def test_writes_and_gathers_by_row() -> None:
    cache = KVCache.allocate(replace(LAYOUT, dtype=torch.float32))
    rows = torch.tensor([2 * 3 * 4 + 1, 2 * 3 * 4 + 1 + 4])  # block 3, offset 1: keys, values
    cache.write(1, rows, torch.arange(32.0).view(2, 16))

    block = cache.layers[1][3]
    assert torch.equal(block[0, 1], torch.arange(16.0).view(2, 8))
    assert torch.equal(block[1, 1], torch.arange(16.0, 32.0).view(2, 8))
    assert sum(layer.count_nonzero() for layer in cache.layers) == 31

    out = cache.gather(1, rows[:1] * 2 + 1, torch.empty(1, 8))
    assert torch.equal(out[0], torch.arange(8.0, 16.0))


def test_blocks_that_fit(tiny_model: Callable[[str], TinyModel]) -> None:
    config = tiny_model("llama").config
    one = 16 * config.kv_bytes_per_token(4)
    assert one == KVLayout.of_model(config, num_blocks=1, block_size=16, dtype=torch.float32).total_bytes
    fit = [
        num_blocks_that_fit(config, block_size=16, dtype=torch.float32, num_bytes=n) for n in (one - 1, one, 3 * one)
    ]
    assert fit == [0, 1, 3]


def test_number_of_blocks_by_flags(tiny_model: Callable[[str], TinyModel]) -> None:
    config = tiny_model("llama").config
    one = 16 * config.kv_bytes_per_token(4)
    assert resolve_num_blocks(config, CacheConfig(kv_cache_bytes=2 * one), torch.float32) == 2
    assert resolve_num_blocks(config, CacheConfig(kv_cache_bytes=2 * one), torch.bfloat16) == 4
    assert resolve_num_blocks(config, CacheConfig(num_blocks=9, kv_cache_bytes=1), torch.float32) == 9
    with pytest.raises(ConfigError, match="--kv-cache-bytes is less than one block"):
        resolve_num_blocks(config, CacheConfig(kv_cache_bytes=one - 1), torch.float32)
