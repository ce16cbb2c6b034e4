"""Rotary position embeddings: the angles of a step's positions, computed once per step and shared by all layers.

Halves are rotated against each other (x[i] with x[i + head_dim / 2]), the layout of transformers checkpoints.
Formulas: transformers 5, modeling_rope_utils.py, and equal to it by test.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines `[num_tokens, 1, head_dim]`, and sines of that shape with the first half negated."""

    cos: Tensor
    signed_sin: Tensor

    def apply_(self, heads: Tensor) -> None:
        """Rotates `heads` `[num_tokens, num_heads, head_dim]` in place; it may be a view."""
        swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
        heads.mul_(self.cos).addcmul_(swapped, self.signed_sin)


class RotaryEmbedding:
    """Computes rotations on demand: no table, so no longest position and no memory."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.inverse_frequencies = inverse_frequencies(config, head_dim)
        self._scale = config.attention_factor

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles are computed in float32 and rounded to `dtype` at the end, as transformers does."""
        angles = positions[:, None, None].float() * self.inverse_frequencies
        cos = (angles.cos() * self._scale).to(dtype)
        sin = (angles.sin() * self._scale).to(dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, `[head_dim / 2]` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavelengths = config.theta**exponents
    match config.kind:
        case "default":
            return 1.0 / wavelengths
        case "linear":
            return 1.0 / wavelengths / config.factor
        case "llama3":
            return _llama3(config, 1.0 / wavelengths)
        case "yarn":
            return _yarn(config, wavelengths, head_dim)


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow pairs are divided by the factor, fast ones kept, those between blended (Llama 3.1)."""
    original = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    is_slow = wavelengths > original / config.low_freq_factor
    is_fast = wavelengths < original / config.high_freq_factor
    return torch.where(is_slow, frequencies / config.factor, torch.where(is_fast, frequencies, blended))


def _yarn(config: RopeConfig, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Pairs are interpolated from the slow end up to a ramp, and left alone beyond it (arXiv 2309.00071)."""
    low = _yarn_pair_turning(config.beta_fast, config, head_dim)
    high = _yarn_pair_turning(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_pair_turning(num_rotations: float, config: RopeConfig, head_dim: int) -> float:
    """The (fractional) pair that turns `num_rotations` times over the original context."""
    original = config.original_max_position_embeddings
    return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))
