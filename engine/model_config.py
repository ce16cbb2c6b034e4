"""The shape of a model, in our own words, made once at the door from a transformers-format config.json. Torch-free.

Whatever would change the numbers and is not implemented is refused here by name: a model never runs wrongly.
Defaults of absent keys are those of the transformers configuration classes of each family.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, UnsupportedModelError
from engine.json_fields import JsonFields
from engine.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model type fixes, beyond the keys of its config.json."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden size over query heads."""
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family(
        architecture="LlamaForCausalLM", max_position_embeddings=2048, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "mistral": _Family(architecture="MistralForCausalLM", max_position_embeddings=131_072, num_kv_heads=8),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM", max_position_embeddings=32_768, num_kv_heads=32, always_qkv_bias=True
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        max_position_embeddings=32_768,
        num_kv_heads=32,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
    ),
}

# Keys that change the numbers when set to anything but the value here.
_NEUTRAL_VALUES: dict[str, Any] = {
    "quantization_config": None,
    "per_layer_config": None,
    "rope_interleaved": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the llama lineage: RMSNorm, RoPE, grouped-query attention, gated SiLU feed-forward."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each query and key head before RoPE."""
    layer_windows: tuple[int | None, ...]
    """Per layer: how many of the last positions, its own included, a query sees; None for all."""
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(f"layer_types names {len(self.layer_windows)} layers, the model has {self.num_layers}")

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "ModelConfig":
        """Reads config.json and, for more end tokens, generation_config.json.

        Raises `UnsupportedModelError` naming what is not implemented, `ConfigError` for a malformed file.
        """
        fields = JsonFields.read(directory / "config.json")
        family_name = _family_name(fields)
        _refuse_what_changes_the_numbers(fields)
        eos = _token_ids(fields)
        generation = directory / "generation_config.json"
        if generation.exists():
            eos |= _token_ids(JsonFields.read(generation))
        return _from_fields(fields, family_name, eos)

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def windows(self) -> frozenset[int | None]:
        """The distinct attention windows of the layers."""
        return frozenset(self.layer_windows)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of keys and values that one position takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * bytes_per_element

    def digest(self) -> str:
        """sha256 over everything that fixes the numbers of a forward. End tokens and the family's name do not."""
        values = asdict(self)
        del values["eos_token_ids"], values["family"]
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def resolve_max_model_len(config: ModelConfig, requested: int | None, *, num_cache_tokens: int | None = None) -> int:
    """The longest prompt plus output in tokens: `requested`, or the most that model and cache allow.

    Raises `ConfigError` naming --max-model-len if `requested` is more than either allows.
    """
    limit = config.max_position_embeddings
    if requested is not None and requested > limit:
        raise ConfigError(f"--max-model-len must be at most the model's {limit} positions, got {requested}")
    if num_cache_tokens is None:
        return requested or limit
    if requested is not None and requested > num_cache_tokens:
        raise ConfigError(
            f"--max-model-len must be at most the {num_cache_tokens} tokens that the KV cache holds, got {requested}; "
            "give it more with --kv-cache-bytes or --num-blocks"
        )
    return requested or min(limit, num_cache_tokens)


def _family_name(fields: JsonFields) -> str:
    architectures = fields.get("architectures") or []
    name = fields.get("model_type") or _family_of_architecture(architectures)
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{fields.source}: model_type {name!r} (architectures {architectures}) is not supported; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    if architectures and architectures != [_FAMILIES[name].architecture]:
        raise UnsupportedModelError(f"{fields.source}: architectures {architectures} is not supported for {name}")
    return str(name)


def _family_of_architecture(architectures: list[Any]) -> str | None:
    return next((name for name, family in _FAMILIES.items() if [family.architecture] == architectures), None)


def _refuse_what_changes_the_numbers(fields: JsonFields) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = fields.get(name)
        if value is not None and value != neutral:
            raise UnsupportedModelError(f"{fields.source}: {name} = {value!r} is not supported")
    activation = fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{fields.source}: hidden_act {activation!r} is not supported, only silu")
    if "AutoModelForCausalLM" in (fields.get("auto_map") or {}):
        raise UnsupportedModelError(f"{fields.source}: auto_map (code of the checkpoint's own) is not supported")


def _from_fields(fields: JsonFields, family_name: str, eos_token_ids: frozenset[int]) -> ModelConfig:
    family = _FAMILIES[family_name]
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    attention_bias = family.reads_attention_bias and fields.boolean("attention_bias", False)
    return ModelConfig(
        family=family_name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=RopeConfig.from_fields(fields, max_positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=family.always_qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(fields, family_name),
        eos_token_ids=eos_token_ids,
    )


def _num_kv_heads(fields: JsonFields, family: _Family, num_heads: int) -> int:
    # An explicit null means one KV head per query head, in every family.
    if "num_key_value_heads" in fields.values:
        return fields.integer("num_key_value_heads", num_heads)
    return family.num_kv_heads or num_heads


def _layer_windows(fields: JsonFields, family_name: str) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    window = _sliding_window(fields, family_name)
    first = fields.integer("max_window_layers", 28, minimum=0) if family_name.startswith("qwen") else 0
    implied = tuple(window if layer >= first else None for layer in range(num_layers))
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return implied
    named = _windows_of_types(layer_types, window, fields.source)
    if not family_name.startswith("qwen") and named != implied:
        # transformers ignores the key for these families; a checkpoint that means it needs another class.
        raise UnsupportedModelError(f"{fields.source}: layer_types is not supported for {family_name}")
    return named


def _sliding_window(fields: JsonFields, family_name: str) -> int | None:
    match family_name:
        case "llama":
            return None
        case "mistral":
            switched_on = fields.values.get("sliding_window", 4096) is not None
        case _:
            # An explicit null switches it off as well.
            switched_on = fields.boolean("use_sliding_window", False)
            switched_on &= fields.values.get("sliding_window", 4096) is not None
    return fields.integer("sliding_window", 4096) if switched_on else None


def _windows_of_types(layer_types: Iterable[str], window: int | None, source: str) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise UnsupportedModelError(f"{source}: layer_types {', '.join(unknown)} is not supported")
    if window is None and "sliding_attention" in layer_types:
        raise UnsupportedModelError(f"{source}: layer_types has sliding_attention, but no sliding_window is in force")
    return tuple(known[layer_type] for layer_type in layer_types)


def _token_ids(fields: JsonFields) -> frozenset[int]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ConfigError(f"{fields.source}: eos_token_id must be token ids, got {value!r}")
    return frozenset(ids)
