"""Attention over the paged KV cache, for one step's mixed batch.

Rows of a step: decode rows first, the longest context first, then prefill chunks one after the other.

    | decode group | decode group | ... | prefill chunk | prefill chunk | ...

A decode group is one gather and two batched matrix products; a prefill chunk is one gather and a loop over runs of
`QUERY_RUN` queries. Query heads that share a KV head are rows of one matrix, so that KV is never expanded.
Only positions of the sequence itself are gathered (padding repeats one of them), so what a freed block holds, NaN
included, is never touched, not even under a mask.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv_cache import KVCache

QUERY_RUN = 64
"""Queries of a prefill chunk that are computed together. Keys after a run's last query are left out, which is where the
half of the work that causality saves comes from, and its scores stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decode rows of like context length. They see `num_keys` positions, the shorter ones padded on the left."""

    start: int
    end: int
    num_keys: int
    head_rows: Tensor
    """Cache rows to gather, `[2 * num_rows * num_kv_heads * num_keys]`: keys then values."""
    mask: Tensor
    """0 or -inf to add to the scores, `[num_rows * num_kv_heads, 1, num_keys]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Rows `start` to `end` are one request's consecutive positions `first_position` and on.

    positions:  ... first_key ........ first_position ........ first_position + (end - start)
                    |        gathered                        |
    """

    start: int
    end: int
    first_position: int
    first_key: int
    head_rows: Tensor
    """Cache rows to gather, `[2 * num_kv_heads * num_keys]`: keys then values."""

    @property
    def num_keys(self) -> int:
        return self.first_position + self.end - self.start - self.first_key


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One step's attention for the layers of one window."""

    window: int | None
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    run_mask: Tensor
    """What each query of a run may see: 0 or -inf, `[QUERY_RUN, num_offsets]`. Column c stands for the key at position
    `c - (num_offsets - QUERY_RUN)` relative to the run's first query, so every run uses a slice of it."""


class PagedAttention:
    """Computes attention; owns the scratch memory that gathered KV passes through.

    The scratch is kept because fresh memory of that size would be mapped and cleared by the system in every layer.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        self._scratch = torch.empty(0)

    def __call__(self, queries: Tensor, kv_cache: KVCache, layer: int, plan: AttentionPlan) -> Tensor:
        """`queries` and result `[num_tokens, num_heads, head_dim]`; the step's own KV is already in the cache."""
        num_tokens = queries.shape[0]
        queries = queries.reshape(num_tokens, self._num_kv_heads, self._group, self._head_dim)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        for group in plan.decode_groups:
            self._decode(queries, out, self._gather(kv_cache, layer, group.head_rows), group)
        for chunk in plan.prefill_chunks:
            self._prefill(queries, out, self._gather(kv_cache, layer, chunk.head_rows), chunk, plan)
        return out.view(num_tokens, -1)

    def _gather(self, kv_cache: KVCache, layer: int, head_rows: Tensor) -> Tensor:
        num_rows = head_rows.shape[0]
        dtype = kv_cache.layout.dtype
        if self._scratch.shape[0] < num_rows or self._scratch.dtype != dtype:
            # Contexts grow by a token per step: round up, or every step would allocate.
            self._scratch = torch.empty(1 << (num_rows - 1).bit_length(), self._head_dim, dtype=dtype)
        return kv_cache.gather(layer, head_rows, self._scratch[:num_rows])

    def _decode(self, queries: Tensor, out: Tensor, gathered: Tensor, group: DecodeGroup) -> None:
        num_pairs = (group.end - group.start) * self._num_kv_heads
        keys, values = gathered.view(2, num_pairs, group.num_keys, self._head_dim)
        rows = queries[group.start : group.end].reshape(num_pairs, self._group, self._head_dim)
        scores = torch.baddbmm(group.mask, rows, keys.transpose(1, 2), alpha=self._scale)
        into = out[group.start : group.end].view(num_pairs, self._group, self._head_dim)
        torch.bmm(scores.softmax(-1), values, out=into)

    def _prefill(
        self, queries: Tensor, out: Tensor, gathered: Tensor, chunk: PrefillChunk, plan: AttentionPlan
    ) -> None:
        """Run by run, each over the keys from the first that its first query sees to its own last query."""
        keys, values = gathered.view(2, self._num_kv_heads, chunk.num_keys, self._head_dim)
        for run in range(chunk.start, chunk.end, QUERY_RUN):
            run_end = min(run + QUERY_RUN, chunk.end)
            first_query = chunk.first_position + run - chunk.start
            first_key = chunk.first_key if plan.window is None else max(chunk.first_key, first_query - plan.window + 1)
            begin, end = first_key - chunk.first_key, first_query + run_end - run - chunk.first_key
            origin = plan.run_mask.shape[1] - QUERY_RUN
            mask = plan.run_mask[: run_end - run, origin + first_key - first_query : origin + run_end - run]
            attended = self._attend(queries[run:run_end], keys[:, begin:end], values[:, begin:end], mask)
            out[run:run_end] = attended

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """`queries` `[n, num_kv_heads, group, head_dim]`, `keys` and `values` `[num_kv_heads, m, head_dim]`."""
        if queries.dtype is torch.float32:
            return self._attend_fused(queries, keys, values, mask)
        return self._attend_by_matmul(queries, keys, values, mask)

    def _attend_fused(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        # The heads of a group become the batch, over which KV is broadcast with stride 0.
        rows = queries.permute(2, 1, 0, 3)
        shape = (self._group, -1, -1, -1)
        attended = F.scaled_dot_product_attention(rows, keys.expand(shape), values.expand(shape), attn_mask=mask)
        return attended.permute(2, 1, 0, 3)

    def _attend_by_matmul(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Twice as fast as the fused kernel in bfloat16, which on a CPU does not multiply in that type."""
        num_queries, num_keys = mask.shape
        rows = queries.permute(1, 2, 0, 3).reshape(self._num_kv_heads, -1, self._head_dim)
        # beta=0: the first argument is only there because scaling inside the product needs this function.
        scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, keys.transpose(1, 2), beta=0, alpha=self._scale)
        scores.view(self._num_kv_heads, self._group, num_queries, num_keys).add_(mask)
        attended = torch.bmm(scores.softmax(-1), values)
        return attended.view(self._num_kv_heads, self._group, num_queries, self._head_dim).permute(2, 0, 1, 3)
