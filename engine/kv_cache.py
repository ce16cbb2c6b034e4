"""The memory of keys and values: per layer one tensor `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.

A block of a layer is one contiguous run of bytes and neighbouring blocks coalesce, so a transfer is few large copies.
Which block belongs to whom is the block pool's business; here are only the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape and type of the cache. Sizes in bytes."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of_model(cls, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> "KVLayout":
        return cls(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_blocks, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """One block of one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


class KVCache:
    """The layers' tensors, and the two flat views of each that writing and gathering use.

    A *token row* is one position's keys or values of all heads; block b, offset o has its keys at token row
    `2 * b * block_size + o` and its values `block_size` rows further. A *head row* is one head of a token row.
    """

    def __init__(self, layout: KVLayout, layers: Sequence[Tensor]) -> None:
        self.layout = layout
        self.layers = tuple(layers)
        self._token_rows = [layer.view(-1, layout.num_kv_heads * layout.head_dim) for layer in self.layers]
        self._head_rows = [layer.view(-1, layout.head_dim) for layer in self.layers]

    @classmethod
    def allocate(cls, layout: KVLayout, buffer: memoryview | mmap | None = None) -> "KVCache":
        """Lays the layers one after the other over `buffer` (shared memory) as it is, or over zeros of its own.

        The cache keeps `buffer` alive. Raises `ValueError` if it is read-only or too small.
        """
        if buffer is None:
            # Pages of an anonymous mapping are zeros that take no memory before they are written.
            buffer = mmap(-1, layout.total_bytes)
        _check_buffer(layout, buffer)
        return cls(layout, [_layer_over(buffer, layout, layer) for layer in range(layout.num_layers)])

    def write(self, layer: int, rows: Tensor, keys_and_values: Tensor) -> None:
        """Stores `keys_and_values` `[num_rows, num_kv_heads * head_dim]` at the token rows `rows` `[num_rows]`."""
        self._token_rows[layer].index_copy_(0, rows, keys_and_values)

    def gather(self, layer: int, rows: Tensor, out: Tensor) -> Tensor:
        """Copies the head rows `rows` `[n]` to `out` `[n, head_dim]`, and returns it."""
        return torch.index_select(self._head_rows[layer], 0, rows, out=out)


def num_blocks_that_fit(config: ModelConfig, *, block_size: int, dtype: torch.dtype, num_bytes: int) -> int:
    """How many blocks `num_bytes` hold over all layers; may be 0."""
    return num_bytes // (block_size * config.kv_bytes_per_token(dtype.itemsize))


def resolve_num_blocks(config: ModelConfig, cache: CacheConfig, dtype: torch.dtype) -> int:
    """The number of blocks that `cache` asks for. Raises `ConfigError` naming the flag if not even one fits."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    num_blocks = num_blocks_that_fit(config, block_size=cache.block_size, dtype=dtype, num_bytes=cache.kv_cache_bytes)
    if num_blocks == 0:
        raise ConfigError(f"--kv-cache-bytes is less than one block of KV, got {cache.kv_cache_bytes}")
    return num_blocks


def _check_buffer(layout: KVLayout, buffer: memoryview | mmap) -> None:
    view = memoryview(buffer)
    if view.readonly:
        raise ValueError("the buffer for the KV cache is read-only")
    if view.nbytes < layout.total_bytes:
        raise ValueError(f"the buffer for the KV cache has {view.nbytes} bytes, {layout.total_bytes} are needed")


def _layer_over(buffer: memoryview | mmap, layout: KVLayout, layer: int) -> Tensor:
    count = layout.layer_bytes // layout.dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=layout.dtype, count=count, offset=layer * layout.layer_bytes)
    return flat.view(layout.layer_shape)
