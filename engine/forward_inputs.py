"""A step's batch as tensors: the last place where a request is a Python object.

Everything is computed with numpy over all requests at once. Rows are reordered: decode rows first, the longest context
first (see `engine.attention`), so sampled rows come with their requests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import QUERY_RUN, AttentionPlan, DecodeGroup, PrefillChunk
from engine.batch import ScheduledRequest
from engine.kv_cache import KVLayout

Ints = NDArray[np.int64]

# A decode group's gathered KV should fit in the processor's cache: over it the products ran at half speed.
DECODE_GROUP_BYTES = 4 << 20
# Rows are padded to the longest of their group, to at most this much.
_MAX_PADDING_RATIO = 2
# Contexts this short cost less than another group would.
_PADDED_FREELY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """What the decoder needs of a step. N rows, one per token."""

    token_ids: Tensor
    """`[N]`"""
    positions: Tensor
    """`[N]`"""
    kv_rows: Tensor
    """Token rows of the cache to write, `[2 * N]`: keys and values of a token in turn."""
    attention: Mapping[int | None, AttentionPlan]
    """One plan for each distinct window of the model's layers."""
    sample_rows: Tensor
    """Rows to compute logits for."""
    sampled_requests: tuple[ScheduledRequest, ...]
    """The requests of `sample_rows`, in that order."""
    output_rows: Tensor
    """`sample_rows`, then the rows whose next prompt tokens are to be scored."""
    scored_requests: tuple[ScheduledRequest, ...] = ()
    """The requests of the latter, in that order."""


def build_forward_inputs(
    requests: Sequence[ScheduledRequest], layout: KVLayout, windows: Iterable[int | None]
) -> ForwardInputs:
    """`requests` must not be empty. Raises `ValueError` if one's block table does not cover its tokens."""
    rows = _Rows(_in_row_order(requests), layout)
    sampled = np.fromiter((request.sampling is not None for request in rows.requests), bool, len(rows.requests))
    positions = rows.positions()
    sample_rows = rows.row_ends[sampled] - 1
    starts = rows.row_starts.tolist()
    scored = [(at, r) for at, r in zip(starts, rows.requests, strict=True) if r.prompt_logprobs is not None]
    return ForwardInputs(
        token_ids=_tensor(_flatten(request.token_ids for request in rows.requests)),
        positions=_tensor(positions),
        kv_rows=_tensor(rows.kv_rows(positions)),
        attention={window: _plan(rows, window) for window in windows},
        sample_rows=_tensor(sample_rows),
        sampled_requests=tuple(request for request in rows.requests if request.sampling is not None),
        output_rows=_tensor(np.concatenate([sample_rows, *(_scored_rows(start, r) for start, r in scored)])),
        scored_requests=tuple(request for _, request in scored),
    )


def _in_row_order(requests: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    decodes = [request for request in requests if len(request.token_ids) == 1]
    chunks = [request for request in requests if len(request.token_ids) != 1]
    return sorted(decodes, key=lambda request: -request.num_computed_tokens) + chunks


def _scored_rows(start: int, request: ScheduledRequest) -> Ints:
    assert request.prompt_logprobs is not None
    return np.arange(start, start + len(request.prompt_logprobs.next_token_ids))


class _Rows:
    """The requests in row order, as arrays with one entry per request.

    rows:  0 ... row_starts[r] ........ row_ends[r] ...
                 | its tokens of this step |
    """

    def __init__(self, requests: list[ScheduledRequest], layout: KVLayout) -> None:
        self.requests = requests
        self.layout = layout
        count = len(requests)
        self.lengths = np.fromiter((len(request.token_ids) for request in requests), np.int64, count)
        self.first_positions = np.fromiter((request.num_computed_tokens for request in requests), np.int64, count)
        self.ends = self.first_positions + self.lengths
        """Context length of each request after this step."""
        self.row_ends = self.lengths.cumsum()
        self.row_starts = self.row_ends - self.lengths
        self.num_decodes = int((self.lengths == 1).sum())
        table_lengths = np.fromiter((len(request.block_ids) for request in requests), np.int64, count)
        self._check_tables(table_lengths)
        self._blocks = _flatten(request.block_ids for request in requests)
        self._table_starts = table_lengths.cumsum() - table_lengths

    def _check_tables(self, table_lengths: Ints) -> None:
        # Past its table's end a request would read and write the blocks of the next one.
        short = np.flatnonzero((table_lengths * self.layout.block_size < self.ends) | (self.lengths == 0))
        if short.size:
            request = self.requests[short[0]]
            raise ValueError(
                f"request {request.request_id}: {len(request.block_ids)} blocks of {self.layout.block_size} for "
                f"{len(request.token_ids)} tokens after {request.num_computed_tokens}"
            )

    def positions(self) -> Ints:
        within: Ints = np.arange(self.row_ends[-1]) - np.repeat(self.row_starts, self.lengths)
        return within + np.repeat(self.first_positions, self.lengths)

    def kv_rows(self, positions: Ints) -> Ints:
        request_index: Ints = np.repeat(np.arange(len(self.requests)), self.lengths)
        keys = self.key_rows(request_index, positions)
        return np.stack((keys, keys + self.layout.block_size), axis=1).reshape(-1)

    def key_rows(self, request_index: Ints, positions: Ints) -> Ints:
        """The cache's token rows of the keys at `positions` of the requests at `request_index` (they broadcast)."""
        block_size = self.layout.block_size
        blocks: Ints = self._blocks[self._table_starts[request_index] + positions // block_size]
        return blocks * (2 * block_size) + positions % block_size

    def head_rows(self, request_index: Ints, positions: Ints) -> Tensor:
        """Head rows to gather so that the result is `[2, num_requests, num_kv_heads, num_positions, head_dim]`.

        `request_index` `[num_requests, 1]`, `positions` `[num_requests, num_positions]`.
        """
        keys = self.key_rows(request_index, positions)
        token_rows = np.stack((keys, keys + self.layout.block_size))[:, :, None, :]
        heads = np.arange(self.layout.num_kv_heads)[:, None]
        return _tensor((token_rows * self.layout.num_kv_heads + heads).reshape(-1))


def _plan(rows: _Rows, window: int | None) -> AttentionPlan:
    chunks = tuple(_prefill_chunks(rows, window))
    return AttentionPlan(
        window=window,
        decode_groups=tuple(_decode_groups(rows, window)),
        prefill_chunks=chunks,
        run_mask=_run_mask(chunks, window, rows.layout.dtype) if chunks else torch.empty(0, 0),
    )


def _decode_groups(rows: _Rows, window: int | None) -> Iterator[DecodeGroup]:
    num_keys = rows.ends[: rows.num_decodes]
    if window is not None:
        num_keys = np.minimum(num_keys, window)
    for start, end in _group_bounds(num_keys, _bytes_per_key(rows.layout)):
        yield _decode_group(rows, start, num_keys[start:end])


def _bytes_per_key(layout: KVLayout) -> int:
    return layout.block_bytes // layout.block_size


def _group_bounds(num_keys: Ints, bytes_per_key: int) -> Iterator[tuple[int, int]]:
    """Splits rows of falling `num_keys` into runs that fit in the cache and need little padding."""
    start = 0
    while start < len(num_keys):
        longest = int(num_keys[start])
        num_fitting = max(1, DECODE_GROUP_BYTES // (longest * bytes_per_key))
        shortest = longest // _MAX_PADDING_RATIO if longest > _PADDED_FREELY else 0
        num_alike = int(np.searchsorted(-num_keys, -shortest, side="right"))
        end = min(start + num_fitting, num_alike)
        yield start, end
        start = end


def _decode_group(rows: _Rows, start: int, num_keys: Ints) -> DecodeGroup:
    longest = int(num_keys[0])
    end = start + len(num_keys)
    columns = np.arange(longest) + (num_keys - longest)[:, None]
    first_keys = (rows.ends[start:end] - num_keys)[:, None]
    # Padding repeats the first key that the row sees anyway: gathering another's memory could bring in NaN.
    positions = first_keys + np.maximum(columns, 0)
    num_kv_heads = rows.layout.num_kv_heads
    mask = torch.zeros(columns.shape, dtype=rows.layout.dtype)
    mask.masked_fill_(torch.from_numpy(columns < 0), -torch.inf)
    return DecodeGroup(
        start=start,
        end=end,
        num_keys=longest,
        head_rows=rows.head_rows(np.arange(start, end)[:, None], positions),
        mask=mask.repeat_interleave(num_kv_heads, dim=0)[:, None],
    )


def _prefill_chunks(rows: _Rows, window: int | None) -> Iterator[PrefillChunk]:
    for index in range(rows.num_decodes, len(rows.requests)):
        first_position, end = int(rows.first_positions[index]), int(rows.ends[index])
        first_key = 0 if window is None else max(0, first_position - window + 1)
        yield PrefillChunk(
            start=int(rows.row_starts[index]),
            end=int(rows.row_ends[index]),
            first_position=first_position,
            first_key=first_key,
            head_rows=rows.head_rows(np.array([[index]]), np.arange(first_key, end)[None]),
        )


def _run_mask(chunks: Sequence[PrefillChunk], window: int | None, dtype: torch.dtype) -> Tensor:
    """See `AttentionPlan.run_mask`; wide enough for the run that looks furthest back."""
    reach = max(chunk.first_position + (chunk.end - chunk.start - 1) // QUERY_RUN * QUERY_RUN for chunk in chunks)
    if window is not None:
        reach = min(reach, window - 1)
    queries, keys = np.arange(QUERY_RUN)[:, None], np.arange(-reach, QUERY_RUN)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)


def _flatten(sequences: Iterable[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(sequences), np.int64)


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(values)
