"""What the server reads of a checkpoint directory: never the weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError
from engine.model_config import ModelConfig
from engine.sampling_params import SamplingParams
from server.chat_template import ChatTemplates, load_chat_template
from server.hermes_tool_parser import HermesToolParser
from server.tokenizer import Tokenizer
from server.tool_parser import ToolParser
from server.tool_parsers import AUTO, choose_tool_parser
from server.version import package_version

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAssets:
    """The text side of a model."""

    directory: Path
    tokenizer: Tokenizer
    chat_templates: ChatTemplates | None = None
    tool_parser: type[ToolParser] = HermesToolParser
    """For the format in which the model writes tool calls."""
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """What generation_config.json says in place of OpenAI's defaults, by the field names of `SamplingParams`."""
    vocab_size: int
    """Ids from here on do not exist for the model."""
    config_digest: str
    """Of the model that this tokenizer belongs to; nodes must serve the same."""

    @property
    def fingerprint(self) -> str:
        """What answers say that they come from: this version of the software, and the model."""
        return f"pdserve-{package_version()}-{self.config_digest[:8]}"

    @property
    def tool_marker_ids(self) -> frozenset[int]:
        """Special tokens that mark tool calls, and so must not be hidden from the parser."""
        tokens = self.tokenizer.file.get_added_tokens_decoder()
        marks = self.tool_parser.marks()
        return frozenset(token_id for token_id in self.tokenizer.special_ids if tokens[token_id].content in marks)


def load_model_assets(directory: Path, tool_call_parser: str = AUTO) -> ModelAssets:
    """Raises `ConfigError` naming --model and the file, or the parser's flag."""
    tokenizer = Tokenizer.from_directory(directory)
    config = _read_json(directory / "config.json")
    templates = load_chat_template(directory, _read_json(directory / "tokenizer_config.json"))
    source = "" if templates is None else templates.tool_use.source
    return ModelAssets(
        directory=directory,
        tokenizer=tokenizer,
        chat_templates=templates,
        tool_parser=choose_tool_parser(tool_call_parser, source, tokenizer.file.get_vocab(with_added_tokens=True)),
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
