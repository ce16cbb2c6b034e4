"""Paged attention against one dense softmax per sequence, with NaN in every slot that a sequence does not own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine import forward_inputs
from engine.attention import PagedAttention
from engine.batch import ScheduledRequest
from engine.forward_inputs import build_forward_inputs
from engine.kv_cache import KVCache, KVLayout

BLOCK_SIZE = 4
NUM_BLOCKS = 300


class Case:
    """Sequences of (computed, new) tokens with random KV in shuffled blocks, and queries for the new ones."""

    def __init__(self, shares: Sequence[tuple[int, int]], *, num_heads: int, num_kv_heads: int, head_dim: int = 16):
        self.generator = torch.Generator().manual_seed(3)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        free = torch.randperm(NUM_BLOCKS, generator=self.generator).tolist()
        self.requests = []
        self.queries, self.keys, self.values = {}, {}, {}
        for index, (computed, new) in enumerate(shares):
            name = f"request-{index}"
            blocks = [free.pop() for _ in range(-(-(computed + new) // BLOCK_SIZE))]
            self.requests.append(
                ScheduledRequest(
                    request_id=name, token_ids=[0] * new, num_computed_tokens=computed, block_ids=blocks, sampling=None
                )
            )
            self.queries[name] = self._random(new, num_heads)
            self.keys[name] = self._random(computed + new, num_kv_heads)
            self.values[name] = self._random(computed + new, num_kv_heads)

    def _random(self, num_tokens: int, num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, self.head_dim, generator=self.generator)

    def cache(self, dtype: torch.dtype) -> KVCache:
        layout = KVLayout(
            num_layers=2,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        cache = KVCache.allocate(layout)
        for layer in cache.layers:
            layer.fill_(torch.nan)
        for request in self.requests:
            for position, (key, value) in enumerate(
                zip(self.keys[request.request_id], self.values[request.request_id], strict=True)
            ):
                block = request.block_ids[position // BLOCK_SIZE]
                cache.layers[1][block, :, position % BLOCK_SIZE] = torch.stack((key, value)).to(dtype)
        return cache

    def expected(self, request: ScheduledRequest, window: int | None) -> Tensor:
        """`[new, num_heads * head_dim]`, in float64."""
        name = request.request_id
        queries = self.queries[name].double()
        group = self.num_heads // self.num_kv_heads
        keys, values = (kv[name].double().repeat_interleave(group, dim=1) for kv in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5
        query_positions = torch.arange(len(queries))[:, None] + request.num_computed_tokens
        key_positions = torch.arange(len(keys))
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def actual(self, window: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
        cache = self.cache(dtype)
        plan = build_forward_inputs(self.requests, cache.layout, {window}).attention[window]
        decodes = [request for request in self.requests if len(request.token_ids) == 1]
        chunks = [request for request in self.requests if len(request.token_ids) > 1]
        ordered = sorted(decodes, key=lambda request: -request.num_computed_tokens) + chunks
        queries = torch.cat([self.queries[request.request_id] for request in ordered]).to(dtype)
        attention = PagedAttention(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        parts = torch.split(attention(queries, cache, 1, plan), [len(request.token_ids) for request in ordered])
        return {request.request_id: part for request, part in zip(ordered, parts, strict=True)}


MIXED = [(130, 1), (0, 1), (0, 150), (37, 64), (2, 5), (40, 1), (63, 65), (7, 1), (100, 2)]


@pytest.mark.parametrize("window", [None, 1, 10, 64, 90])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_mixed_batch(
    num_heads: int, num_kv_heads: int, window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    case = Case(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads)
    actual = case.actual(window, dtype)
    for request in case.requests:
        expected = case.expected(request, window).float()
        assert_close(actual[request.request_id].float(), expected, atol=tolerance, rtol=0)


def test_decode_rows_in_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_inputs, "DECODE_GROUP_BYTES", 20_000)
    case = Case([(computed, 1) for computed in (5, 90, 91, 200, 0, 64, 17, 66)], num_heads=4, num_kv_heads=2)
    actual = case.actual(None, torch.float32)
    for request in case.requests:
        assert_close(actual[request.request_id], case.expected(request, None).float(), atol=1e-5, rtol=0)


def test_scratch_is_reused_while_contexts_grow() -> None:
    case = Case([(40, 1)], num_heads=2, num_kv_heads=2)
    cache = case.cache(torch.float32)
    attention = PagedAttention(num_heads=2, num_kv_heads=2, head_dim=16)
    addresses = set()
    for computed in range(33, 40):
        request = case.requests[0]._replace(num_computed_tokens=computed)
        plan = build_forward_inputs([request], cache.layout, {None}).attention[None]
        attention(case.queries["request-0"], cache, 1, plan)
        addresses.add(attention._scratch.data_ptr())
    assert len(addresses) == 1
