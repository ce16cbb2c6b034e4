"""Which bytes of which blocks a range of positions is, and how they are moved.

    block table:   [ 4 ][ 5 ][ 6 ]          block_size 16
    positions:     0....16...32..35         35 tokens: blocks 4 and 5 whole, of block 6 the slots 0 to 2

A KV tensor of one layer is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`. Never is anything beyond the
range's own slots read or written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

UNIT_BYTES = 1 << 20
"""Smaller units pay per message, larger ones fall out of the caches; measured over TCP on one host."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`num_blocks` neighbours of a block table, from `index` on, of each the slots `[first_slot, end_slot)`."""

    index: int
    num_blocks: int
    first_slot: int
    end_slot: int


def block_runs(start: int, end: int, block_size: int) -> list[BlockRun]:
    """The positions `[start, end)` as at most three runs: a partial head, whole blocks, a partial tail."""
    if end <= start:
        return []
    first, last = start // block_size, (end - 1) // block_size
    head_slot, tail_slot = start % block_size, (end - 1) % block_size + 1
    if first == last:
        return [BlockRun(first, 1, head_slot, tail_slot)]
    runs = []
    if head_slot:
        runs.append(BlockRun(first, 1, head_slot, block_size))
        first += 1
    whole_end = last + 1 if tail_slot == block_size else last
    if whole_end > first:
        runs.append(BlockRun(first, whole_end - first, 0, block_size))
    if tail_slot != block_size:
        runs.append(BlockRun(last, 1, 0, tail_slot))
    return runs


def unit_num_bytes(kv_cache: torch.Tensor, start: int, end: int) -> int:
    """Bytes of the positions `[start, end)` in one layer."""
    _, two, _, num_kv_heads, head_dim = kv_cache.shape
    return (end - start) * two * num_kv_heads * head_dim * kv_cache.element_size()


def unit_spans(kv_cache: torch.Tensor, start: int, end: int) -> Iterator[range]:
    """`[start, end)` in pieces of about `UNIT_BYTES`, cut at block borders."""
    block_size = kv_cache.shape[2]
    step = max(1, UNIT_BYTES // unit_num_bytes(kv_cache, 0, block_size)) * block_size
    while start < end:
        stop = min(end, start - start % block_size + step)
        yield range(start, stop)
        start = stop


def gather_unit(kv_cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
    """A fresh contiguous uint8 tensor with the payload of `[start, end)`."""
    payload = torch.empty(unit_num_bytes(kv_cache, start, end), dtype=torch.uint8, device=kv_cache.device)
    for stored, moving in _pairs(kv_cache, block_ids, start, end, payload):
        moving.copy_(stored)
    return payload


def scatter_unit(kv_cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int, payload: torch.Tensor) -> None:
    """Writes a payload made by `gather_unit` into the blocks of another table. `payload` is uint8 of the exact size."""
    if payload.numel() != unit_num_bytes(kv_cache, start, end):
        raise ValueError(f"payload of {payload.numel()} bytes for positions [{start}, {end})")
    for stored, moving in _pairs(kv_cache, block_ids, start, end, payload):
        stored.copy_(moving)


def copy_unit(
    source: torch.Tensor, source_ids: Sequence[int], target: torch.Tensor, target_ids: Sequence[int], span: range
) -> None:
    """Copies the positions of `span` between two caches, one copy for each stretch that is contiguous in both."""
    for run in block_runs(span.start, span.stop, source.shape[2]):
        for index, num_blocks in _stretches(run, source_ids, target_ids):
            from_id, to_id = source_ids[index], target_ids[index]
            slots = slice(run.first_slot, run.end_slot)
            target[to_id : to_id + num_blocks, :, slots].copy_(source[from_id : from_id + num_blocks, :, slots])


def _pairs(
    kv_cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int, payload: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(view of the cache, view of the payload) for each contiguous stretch."""
    _, two, block_size, num_kv_heads, head_dim = kv_cache.shape
    typed = payload.view(kv_cache.dtype)
    offset = 0
    for run in block_runs(start, end, block_size):
        num_slots = run.end_slot - run.first_slot
        for index, num_blocks in _stretches(run, block_ids):
            block_id = block_ids[index]
            stored = kv_cache[block_id : block_id + num_blocks, :, run.first_slot : run.end_slot]
            size = num_blocks * two * num_slots * num_kv_heads * head_dim
            yield stored, typed[offset : offset + size].view(stored.shape)
            offset += size


def _stretches(run: BlockRun, *tables: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Splits a run where the ids of any table stop being consecutive: (index, number of blocks)."""
    index, stop = run.index, run.index + run.num_blocks
    while index < stop:
        end = index + 1
        while end < stop and all(table[end] == table[end - 1] + 1 for table in tables):
            end += 1
        yield index, end - index
        index = end
