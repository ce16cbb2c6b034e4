"""Rotary embeddings against transformers' own, and the form of the rotation."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from engine.rope import RotaryEmbedding, inverse_frequencies
from engine.rope_config import RopeConfig

HEAD_DIM = 32


def oracle(config: RopeConfig, **parameters: object) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = "linear" if config.kind == "default" else config.kind
    rope = {"rope_type": kind, "rope_theta": config.theta, "factor": config.factor, **parameters}
    llama = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (RopeConfig(theta=1e4), {}),
        (RopeConfig(theta=1e4, kind="linear", factor=3.0), {}),
        (
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                original_max_position_embeddings=512,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            {"original_max_position_embeddings": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        (
            RopeConfig(theta=1e4, kind="yarn", factor=8.0, original_max_position_embeddings=512),
            {"original_max_position_embeddings": 512},
        ),
        (
            RopeConfig(
                theta=1e4, kind="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=8.0, truncate=False
            ),
            {"original_max_position_embeddings": 512, "beta_fast": 8.0, "truncate": False},
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-untruncated"],
)
def test_frequencies_equal_transformers(config: RopeConfig, parameters: dict[str, object]) -> None:
    expected, _ = oracle(config, **parameters)
    assert_close(inverse_frequencies(config, HEAD_DIM), expected, atol=0, rtol=1e-6)


def test_a_yarn_step_instead_of_a_ramp_is_finite() -> None:
    # Both ends of the ramp fall on pair 0.
    config = RopeConfig(theta=1e4, kind="yarn", factor=2.0, original_max_position_embeddings=6)
    assert inverse_frequencies(config, HEAD_DIM).isfinite().all()


def test_rotates_halves_against_each_other_in_place() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=1e4), HEAD_DIM)
    heads = torch.randn(3, 5, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    pairs = torch.complex(heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :])
    positions = torch.tensor([0, 7, 900])
    angles = positions[:, None, None] * rotary.inverse_frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)

    rotary.rotation(positions, torch.float32).apply_(heads[:, 1:4])

    assert_close(heads[:, 1:4], torch.cat((turned.real, turned.imag), dim=-1)[:, 1:4])
    assert_close(heads[:, 0], torch.cat((pairs.real, pairs.imag), dim=-1)[:, 0])


def test_attention_factor_scales_both() -> None:
    config = RopeConfig(theta=1e4)
    plain, scaled = (
        RotaryEmbedding(replace(config, attention_factor=factor), HEAD_DIM).rotation(torch.tensor([3]), torch.float32)
        for factor in (1.0, 1.25)
    )
    assert_close(scaled.cos, 1.25 * plain.cos)
    assert_close(scaled.signed_sin, 1.25 * plain.signed_sin)
