"""Batches to tensors: rows, positions, cache rows, and the grouping of decode rows."""

import random
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine import forward_inputs
from engine.attention import QUERY_RUN, AttentionPlan
from engine.batch import ScheduledRequest
from engine.forward_inputs import ForwardInputs, build_forward_inputs
from engine.kv_cache import KVLayout
from tests.paged_model import GREEDY

LAYOUT = KVLayout(num_layers=2, num_blocks=500, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def share(
    name: str, num_tokens: int, *, computed: int = 0, sampled: bool = True, block_ids: Iterable[int] | None = None
) -> ScheduledRequest:
    """Token ids count up from 100 times the position; the block table is shuffled with the name as the seed."""
    count = -(-(computed + num_tokens) // LAYOUT.block_size)
    return ScheduledRequest(
        request_id=name,
        token_ids=[100 * (computed + index) for index in range(num_tokens)],
        num_computed_tokens=computed,
        block_ids=random.Random(name).sample(range(500), count) if block_ids is None else list(block_ids),
        sampling=GREEDY if sampled else None,
    )


def build(*requests: ScheduledRequest, window: int | None = None) -> tuple[ForwardInputs, AttentionPlan]:
    inputs = build_forward_inputs(requests, LAYOUT, {window})
    return inputs, inputs.attention[window]


def key_head_rows(request: ScheduledRequest, positions: Iterable[int]) -> list[list[int]]:
    """By the layout's definition: for each KV head the cache's head rows of the keys at `positions`."""
    rows = torch.arange(500 * 2 * 4 * 2).view(500, 2, 4, 2)
    return [[int(rows[request.block_ids[p // 4], 0, p % 4, head]) for p in positions] for head in range(2)]


class TestRows:
    def test_decodes_come_first_and_longest_first(self) -> None:
        inputs, _ = build(
            share("a", 3), share("b", 1, computed=5), share("c", 2, computed=7), share("d", 1, computed=9)
        )
        assert [request.request_id for request in inputs.sampled_requests] == ["d", "b", "a", "c"]
        assert inputs.positions.tolist() == [9, 5, 0, 1, 2, 7, 8]
        assert inputs.token_ids.tolist() == [900, 500, 0, 100, 200, 700, 800]
        assert inputs.sample_rows.tolist() == [0, 1, 4, 6]

    def test_only_sampled_rows_get_logits(self) -> None:
        inputs, _ = build(share("a", 3, sampled=False), share("b", 1, computed=5), share("c", 2))
        assert [request.request_id for request in inputs.sampled_requests] == ["b", "c"]
        assert inputs.sample_rows.tolist() == [0, 5]

    def test_kv_rows_follow_the_block_table(self) -> None:
        inputs, _ = build(share("a", 3, computed=6, block_ids=[40, 7, 30]))
        # Positions 6 and 7 are offsets 2 and 3 of block 7, position 8 is offset 0 of block 30.
        keys = [7 * 8 + 2, 7 * 8 + 3, 30 * 8]
        assert inputs.kv_rows.view(-1, 2).tolist() == [[row, row + 4] for row in keys]

    def test_spare_blocks_are_left_alone(self) -> None:
        first, second = share("a", 1, computed=1, block_ids=[3, 4, 5, 6]), share("b", 1, block_ids=[9, 8])
        inputs, _ = build(first, second)
        assert inputs.kv_rows.view(-1, 2)[:, 0].tolist() == [3 * 8 + 1, 9 * 8]

    @pytest.mark.parametrize("num_tokens", [0, 4, 30])
    def test_a_table_that_does_not_cover_the_tokens(self, num_tokens: int) -> None:
        good = share("good", 5)
        bad = ScheduledRequest(
            request_id="bad", token_ids=[1] * num_tokens, num_computed_tokens=5, block_ids=[1, 2], sampling=None
        )
        with pytest.raises(ValueError, match=f"request bad: 2 blocks of 4 for {num_tokens} tokens after 5"):
            build(good, bad)


class TestDecodeGroups:
    @pytest.mark.parametrize("window", [None, 6, 1, 50])
    def test_gathers_what_each_row_sees_and_pads_with_its_own(self, window: int | None) -> None:
        requests = [share("a", 1, computed=10), share("b", 1, computed=4), share("c", 1)]
        _, plan = build(*requests, window=window)
        (group,) = plan.decode_groups
        assert (group.start, group.end) == (0, 3)

        rows = group.head_rows.view(2, 3, 2, group.num_keys)
        mask = group.mask.view(3, 2, group.num_keys)
        assert torch.equal(rows[1], rows[0] + 4 * 2)
        for index, request in enumerate(requests):
            end = request.num_computed_tokens + 1
            seen = range(0 if window is None else max(0, end - window), end)
            num_padding = group.num_keys - len(seen)
            expected = key_head_rows(request, [seen[0]] * num_padding + list(seen))
            assert rows[0, index].tolist() == expected
            assert (mask[index] == 0).tolist() == [[False] * num_padding + [True] * len(seen)] * 2
        assert group.num_keys == min(11, window or 11)

    def test_a_long_context_does_not_pad_many_short_ones(self) -> None:
        _, plan = build(*(share(str(length), 1, computed=length) for length in (900, 300, 290, 149, 140, 20, 5)))
        assert [group.num_keys for group in plan.decode_groups] == [901, 301, 141, 21]
        assert [(group.start, group.end) for group in plan.decode_groups] == [(0, 1), (1, 4), (4, 5), (5, 7)]

    def test_short_contexts_share_a_group(self) -> None:
        _, plan = build(*(share(str(length), 1, computed=length) for length in (60, 20, 1)))
        assert [(group.start, group.end) for group in plan.decode_groups] == [(0, 3)]

    def test_a_group_fits_in_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bytes_per_key = LAYOUT.block_bytes // LAYOUT.block_size
        monkeypatch.setattr(forward_inputs, "DECODE_GROUP_BYTES", 25 * bytes_per_key)
        _, plan = build(*(share(str(index), 1, computed=9) for index in range(5)))
        assert [(group.start, group.end) for group in plan.decode_groups] == [(0, 2), (2, 4), (4, 5)]

    def test_groups_cover_all_rows_once(self) -> None:
        lengths = np.sort(np.random.default_rng(0).integers(1, 3000, 200))[::-1]
        bounds = list(forward_inputs._group_bounds(lengths, 4096))
        assert bounds[0][0] == 0
        assert bounds[-1][1] == 200
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        for start, end in bounds:
            assert end > start
            assert lengths[start] <= max(2 * lengths[end - 1] + 1, 64)


class TestPrefillChunks:
    @pytest.mark.parametrize(("window", "first_key"), [(None, 0), (6, 5), (50, 0)])
    def test_gathers_prefix_and_chunk(self, window: int | None, first_key: int) -> None:
        request = share("a", 7, computed=10)
        _, plan = build(share("b", 1, computed=2), request, window=window)
        (chunk,) = plan.prefill_chunks
        assert (chunk.start, chunk.end, chunk.first_position, chunk.first_key) == (1, 8, 10, first_key)
        rows = chunk.head_rows.view(2, 2, chunk.num_keys)
        assert rows[0].tolist() == key_head_rows(request, range(first_key, 17))
        assert torch.equal(rows[1], rows[0] + 4 * 2)

    @pytest.mark.parametrize("window", [None, 5, 100])
    def test_run_mask_is_causal_and_windowed(self, window: int | None) -> None:
        _, plan = build(share("a", QUERY_RUN + 3, computed=9), window=window)
        reach = plan.run_mask.shape[1] - QUERY_RUN
        assert reach == min(9 + QUERY_RUN, (window or 1000) - 1)
        for query in (0, 1, QUERY_RUN - 1):
            visible = [c - reach for c in range(plan.run_mask.shape[1]) if plan.run_mask[query, c] == 0]
            oldest = -reach if window is None else max(-reach, query - window + 1)
            assert visible == list(range(oldest, query + 1))

    def test_no_mask_without_chunks(self) -> None:
        _, plan = build(share("a", 1, computed=9))
        assert plan.prefill_chunks == ()
        assert plan.run_mask.numel() == 0


def test_one_plan_for_each_window() -> None:
    inputs = build_forward_inputs([share("a", 1, computed=20)], LAYOUT, {None, 8})
    assert {window: plan.decode_groups[0].num_keys for window, plan in inputs.attention.items()} == {None: 21, 8: 8}
