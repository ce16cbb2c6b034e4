"""The sampler's random numbers: one for each (seed, output position, token id), the same on every node.

There is no generator and so no state: a number is a hash of what it belongs to. Only whole-number operations lead to
its random bits, so they are equal on every device and in every batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def row_keys(draws: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """int32 [2, len(draws), 1]: two independent halves of a 64-bit key for each (seed, output position)."""
    keys = [_splitmix64(_splitmix64(seed) ^ position) for seed, position in draws]
    halves = [[_signed(key & _MASK32) for key in keys], [_signed(key >> 32) for key in keys]]
    return torch.tensor(halves, dtype=torch.int32, device=device).unsqueeze(-1)


def token_codes(vocab_size: int, device: torch.device) -> Tensor:
    """int32 [vocab_size]: a scrambled number for each token id, so that neighbouring ids have nothing in common."""
    return _mix(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device))


def exponential_noise(keys: Tensor, codes: Tensor) -> Tensor:
    """float32 [rows, tokens]: standard exponential variables, all > 0 and finite.

    keys: int32 [2, rows, 1] of `row_keys`; codes: int32 [tokens] or [rows, tokens] of `token_codes`.
    """
    # The odd factor is a second key: with the xor alone, one row would have another row's noise in another order.
    bits = _mix((codes ^ keys[0]).mul_(keys[1] | 1))
    # Small values win a race, so they are the ones that need precision: log1p(-v) keeps it where log(1 - v) loses it.
    # Hence also 31 bits without the sign: small ones become floats exactly.
    uniform = bits.bitwise_and_(_MASK32 >> 1).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """In-place bijection of 32-bit words whose every output bit depends on every input bit (C. Wellons, lowbias32)."""
    bits ^= _shift_right(bits, 16)
    bits *= 0x7FEB352D
    bits ^= _shift_right(bits, 15)
    bits *= _signed(0x846CA68B)
    bits ^= _shift_right(bits, 16)
    return bits


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Zeros come in from the left; torch's own shift of a signed word repeats the sign."""
    return (bits >> by).bitwise_and_(_MASK32 >> by)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _splitmix64(word: int) -> int:
    """Sebastiano Vigna's splitmix64 finaliser."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)
