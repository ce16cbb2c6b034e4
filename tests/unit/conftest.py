"""Fixtures of the tests that run a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.decoder import Decoder
from engine.model_config import ModelConfig
from engine.weights import load_weights
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny models only get slower with more, and results must not depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A checkpoint, the oracle that reads it, and our decoder of it."""

    directory: Path
    config: ModelConfig
    oracle: Any
    decoder: Decoder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """The variant's model, made once per session. Nobody changes it."""
    made: dict[str, TinyModel] = {}

    def make(variant: str) -> TinyModel:
        if variant not in made:
            made[variant] = _load(save_tiny_model(tmp_path_factory.mktemp(variant), variant))
        return made[variant]

    return make


def _load(directory: Path) -> TinyModel:
    from transformers import AutoModelForCausalLM

    config = ModelConfig.from_checkpoint(directory)
    return TinyModel(
        directory=directory,
        config=config,
        oracle=AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager"),
        decoder=Decoder(config, load_weights(directory, config, torch.float32)),
    )
