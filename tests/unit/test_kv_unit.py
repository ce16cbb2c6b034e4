import pytest
import torch

from connector.kv_unit import BlockRun, block_runs, copy_unit, gather_unit, scatter_unit, unit_num_bytes

BLOCK_SIZE = 16


def make_cache(num_blocks: int = 8, block_size: int = BLOCK_SIZE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (num_blocks, 2, block_size, 2, 4)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype)


def rows(cache: torch.Tensor, block_ids: list[int], start: int, end: int) -> torch.Tensor:
    """The slow way: one position at a time, `[positions, 2, heads, dim]`."""
    size = cache.shape[2]
    return torch.stack([cache[block_ids[p // size], :, p % size] for p in range(start, end)])


def test_w8_the_last_block_carries_only_its_valid_tokens():
    # W8: 35 tokens into blocks 4, 5, 6.
    assert block_runs(0, 35, 16) == [BlockRun(0, 2, 0, 16), BlockRun(2, 1, 0, 3)]
    source, target = make_cache(), torch.full_like(make_cache(), torch.nan)
    source[6, :, 3:] = torch.nan
    scatter_unit(target, [4, 5, 6], 0, 35, gather_unit(source, [4, 5, 6], 0, 35))
    assert torch.equal(rows(target, [4, 5, 6], 0, 35), rows(source, [4, 5, 6], 0, 35))
    assert target[6, :, 3:].isnan().all()
    assert target[[0, 1, 2, 3, 7]].isnan().all()


def test_w11_only_what_the_decode_side_lacks_travels():
    # W11: the prefill side holds [0, 2048) in 32 blocks of 64, the decode side [0, 1984).
    assert block_runs(1984, 2048, 64) == [BlockRun(31, 1, 0, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "span",
    [(0, 1), (0, 4), (0, 16), (3, 16), (3, 5), (5, 16), (5, 17), (16, 32), (15, 33), (0, 48), (7, 64), (1, 47)],
)
def test_a_unit_moves_its_positions_and_nothing_else(span: tuple[int, int], dtype: torch.dtype):
    source_ids, target_ids = [6, 2, 3, 0], [1, 2, 3, 7]
    source, target = make_cache(dtype=dtype), torch.full_like(make_cache(dtype=dtype), torch.nan)
    direct = target.clone()
    payload = gather_unit(source, source_ids, *span)
    assert payload.numel() == unit_num_bytes(source, *span)
    scatter_unit(target, target_ids, *span, payload)
    copy_unit(source, source_ids, direct, target_ids, range(*span))
    assert torch.equal(rows(target, target_ids, *span), rows(source, source_ids, *span))
    assert target.isnan().sum() == target.numel() - (span[1] - span[0]) * 2 * 2 * 4
    assert torch.equal(target.nan_to_num(-1), direct.nan_to_num(-1))


def test_a_payload_of_another_size_is_refused():
    with pytest.raises(ValueError, match="payload of 8 bytes"):
        scatter_unit(make_cache(), [0], 0, 3, torch.zeros(8, dtype=torch.uint8))


def test_an_empty_range_has_no_runs():
    assert block_runs(5, 5, 16) == []
