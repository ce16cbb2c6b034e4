"""What the server reads of a checkpoint directory: never the weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError
from engine.model_config import ModelConfig
from engine.sampling_params import SamplingParams
from server.chat_template import ChatTemplate, load_chat_template
from server.tokenizer import Tokenizer

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAssets:
    """The text side of a model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """What generation_config.json says in place of OpenAI's defaults, by the field names of `SamplingParams`."""
    vocab_size: int
    """Ids from here on do not exist for the model."""
    config_digest: str
    """Of the model that this tokenizer belongs to; nodes must serve the same."""


def load_model_assets(directory: Path) -> ModelAssets:
    """Raises `ConfigError` naming --model and the file."""
    tokenizer = Tokenizer.from_directory(directory)
    config = _read_json(directory / "config.json")
    return ModelAssets(
        tokenizer=tokenizer,
        chat_template=load_chat_template(directory, _read_json(directory / "tokenizer_config.json")),
        sampling_defaults=_sampling_defaults(_read_json(directory / "generation_config.json")),
        vocab_size=_vocab_size(config, tokenizer),
        config_digest=ModelConfig.from_checkpoint(directory).digest(),
    )


def _vocab_size(config: dict[str, Any], tokenizer: Tokenizer) -> int:
    text_config = config.get("text_config", config)
    size = text_config.get("vocab_size", tokenizer.vocab_size)
    return int(size)


def _sampling_defaults(generation_config: dict[str, Any]) -> dict[str, float]:
    """Checked here, or every request would be told that it is wrong."""
    values = {name: generation_config.get(name) for name in _SAMPLING_FIELDS}
    defaults = {name: value for name, value in values.items() if isinstance(value, int | float)}
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]
    except RequestError as error:
        raise ConfigError(f"--model: generation_config.json: {error}") from error
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--model: {path} does not hold a JSON object")
    return value
