"""A checkpoint's weights, copied once from memory-mapped safetensors straight into fused parameters.

Fused: query, key and value projections in one matrix, gate and up in another, so that a layer is four matrix products.
At no time are there two full copies: pages of the files are the system's to drop.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint_tensors import CheckpointTensors
from engine.config import DType
from engine.errors import ConfigError, UnsupportedModelError
from engine.model_config import ModelConfig

_LOADABLE = (torch.float32, torch.bfloat16, torch.float16)


class TensorSource(Protocol):
    """Where tensors come from, under their transformers names."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor; need not be a copy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are `[out_features, in_features]`; rows of `qkv`: query heads, key heads, values."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole model. `head` is `embedding` itself where the checkpoint ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def resolve_dtype(name: DType) -> torch.dtype:
    """auto is float32: on a CPU it is the type in which we equal transformers."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """The weights of a transformers-format directory; see `fill_weights` for what is refused."""
    with CheckpointTensors(directory) as source:
        return fill_weights(source, config, dtype)


def fill_weights(source: TensorSource, config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Reads every tensor of `source` into place, converting to `dtype`.

    Raises `ConfigError` naming the tensor if one is missing, unexpected or of the wrong shape, and
    `UnsupportedModelError` for one that is not of a floating type.
    """
    weights = allocate_weights(config, dtype)
    places = dict(_places(config, weights))
    _check_names(config, places.keys(), source.names())
    for name, place in places.items():
        _fill(name, place, source.read(name))
    if config.tie_word_embeddings and "lm_head.weight" in source.names():
        _check_tie(source)
    return weights


def allocate_weights(config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Uninitialised parameters of the model's shape."""
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_allocate_layer(config, dtype) for _ in range(config.num_layers)),
        norm=torch.empty(config.hidden_size, dtype=dtype),
        head=embedding if config.tie_word_embeddings else torch.empty_like(embedding),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(qkv_rows, hidden),
        qkv_bias=empty(qkv_rows) if config.qkv_bias else None,
        q_norm=empty(config.head_dim) if config.qk_norm else None,
        k_norm=empty(config.head_dim) if config.qk_norm else None,
        o=empty(hidden, config.num_heads * config.head_dim),
        o_bias=empty(hidden) if config.o_bias else None,
        post_attention_norm=empty(hidden),
        gate_up=empty(2 * intermediate, hidden),
        gate_up_bias=empty(2 * intermediate) if config.mlp_bias else None,
        down=empty(hidden, intermediate),
        down_bias=empty(hidden) if config.mlp_bias else None,
    )


def _places(config: ModelConfig, weights: DecoderWeights) -> Iterator[tuple[str, Tensor]]:
    """Each checkpoint tensor's name and the part of a parameter that it fills."""
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.norm
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_norm
        yield from _attention_places(config, layer, f"{prefix}.self_attn")
        yield from _mlp_places(layer, f"{prefix}.mlp")


def _attention_places(config: ModelConfig, layer: LayerWeights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    projections = [f"{prefix}.{part}_proj" for part in "qkv"]
    yield from _parts(projections, layer.qkv, layer.qkv_bias, rows)
    yield from _parts([f"{prefix}.o_proj"], layer.o, layer.o_bias, [config.hidden_size])
    if layer.q_norm is not None and layer.k_norm is not None:
        yield f"{prefix}.q_norm.weight", layer.q_norm
        yield f"{prefix}.k_norm.weight", layer.k_norm


def _mlp_places(layer: LayerWeights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    hidden, intermediate = layer.down.shape
    projections = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    yield from _parts(projections, layer.gate_up, layer.gate_up_bias, [intermediate, intermediate])
    yield from _parts([f"{prefix}.down_proj"], layer.down, layer.down_bias, [hidden])


def _parts(names: list[str], weight: Tensor, bias: Tensor | None, rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(names, torch.split(weight, rows), strict=True):
        yield f"{name}.weight", part
    if bias is not None:
        for name, part in zip(names, torch.split(bias, rows), strict=True):
            yield f"{name}.bias", part


def _check_names(config: ModelConfig, wanted: Set[str], found: frozenset[str]) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise ConfigError(f"the checkpoint lacks {_some(missing)}, which its config.json asks for")
    unexpected = sorted(name for name in found - wanted if not _is_redundant(config, name))
    if unexpected:
        raise ConfigError(f"the checkpoint has {_some(unexpected)}, which its config.json does not account for")


def _is_redundant(config: ModelConfig, name: str) -> bool:
    """Old checkpoints carry the rotary frequencies, some the tied head: both follow from what is loaded."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _fill(name: str, place: Tensor, tensor: Tensor) -> None:
    if tensor.dtype not in _LOADABLE:
        raise UnsupportedModelError(f"{name} is of type {tensor.dtype}, which is not supported")
    if tensor.shape != place.shape:
        raise ConfigError(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}")
    place.copy_(tensor)


def _check_tie(source: TensorSource) -> None:
    # transformers unties such a checkpoint; older versions did not. Neither is right for sure, so neither is done.
    if not torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
        raise UnsupportedModelError(
            "lm_head.weight differs from model.embed_tokens.weight, yet config.json sets tie_word_embeddings"
        )
