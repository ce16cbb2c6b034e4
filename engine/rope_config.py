"""Which rotary position embedding a checkpoint was trained with. Torch-free; `engine.rope` turns it into frequencies.

Reads both forms of transformers: `rope_theta` beside `rope_scaling` (before version 5), and `rope_parameters`.
Formulas and defaults: transformers 5, modeling_rope_utils.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

from engine.errors import UnsupportedModelError
from engine.json_fields import JsonFields

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_KNOWN_KEYS = frozenset(
    {
        *("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "finetuned"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Everything that fixes the rotation angles. A field that its kind does not use keeps its default."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    """Multiplies sine and cosine (yarn)."""
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_fields(cls, config: JsonFields, max_position_embeddings: int) -> "RopeConfig":
        """`config` is the whole config.json. Raises `UnsupportedModelError` naming the variant."""
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.object(name)
        _refuse_unknown_keys(rope)
        for fields in (rope, config):
            if fields.number("partial_rotary_factor", 1.0) != 1.0:
                raise UnsupportedModelError(f"{fields.source}: partial_rotary_factor is not supported")
        theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
        kind = rope.get("rope_type") or rope.get("type") or "default"
        original = config.integer(
            "original_max_position_embeddings",
            rope.integer("original_max_position_embeddings", max_position_embeddings),
        )
        match kind:
            # Dynamic NTK changes the angles only beyond max_position_embeddings, and no request is let go there.
            case "default" | "dynamic":
                return cls(theta=theta)
            case "linear":
                return cls(theta=theta, kind="linear", factor=rope.number("factor"))
            case "llama3":
                return _llama3(rope, theta, original)
            case "yarn":
                return _yarn(rope, theta, original, max_position_embeddings)
        raise UnsupportedModelError(f"{rope.source}: rope type {kind!r} is not supported")


def _refuse_unknown_keys(rope: JsonFields) -> None:
    unknown = sorted(set(rope.values) - _KNOWN_KEYS)
    if unknown:
        raise UnsupportedModelError(f"{rope.source}: {', '.join(unknown)} is not supported")


def _llama3(rope: JsonFields, theta: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _yarn(rope: JsonFields, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = rope.number("factor", max_position_embeddings / original)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        original_max_position_embeddings=original,
        # Zero means the default, as in transformers.
        beta_fast=rope.number("beta_fast", 32.0) if rope.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow", 1.0) if rope.get("beta_slow") else 1.0,
        truncate=rope.boolean("truncate", True),
    )


def _yarn_attention_factor(rope: JsonFields, factor: float) -> float:
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
