"""GGUF to a transformers-format checkpoint directory: the tensors' names, the layout llama.cpp changed, config.json.

    token_embd.weight             model.embed_tokens.weight
    blk.N.attn_q.weight           model.layers.N.self_attn.q_proj.weight   (llama: rows permuted, undone here)
    output.weight                 lm_head.weight                           (absent: tied to the embedding)
    rope_freqs.weight             config.json's llama3 rope scaling

Weights are stored as float32 whatever the file's type: a dequantised weight is (integer x scale), which no 16-bit float
holds exactly, and F16 and BF16 fit into float32 without loss. The dtype to serve in is chosen at load.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_config import checkpoint_config, generation_config
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import write_tokenizer
from engine.safetensors_writer import num_bytes, write_safetensors

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Held elsewhere: the first in config.json, the second recomputed from rope_theta.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")

Array = NDArray[np.float32]


def convert_gguf(source: Path, target: Path, advance: Callable[[int], None] = lambda done: None) -> None:
    """Write the checkpoint in `source` into the existing directory `target`; `advance` is told the bytes written.

    Raises `UnsupportedModelError` naming what the decoder does not implement, `ConfigError` for a damaged file.
    """
    file = GgufFile(source)
    config = checkpoint_config(file)
    names = _transformers_names(file, config)
    write_tokenizer(file, target)
    _write_json(target / "generation_config.json", generation_config(file))
    _write_weights(file, names, config, target, advance)
    # Last: a directory with a config.json is whole.
    _write_json(target / "config.json", config)


def checkpoint_bytes(source: Path) -> int:
    """Size of the weights that `convert_gguf` will write."""
    file = GgufFile(source)
    return sum(num_bytes(file.shape(name)) for name in file.tensor_names if not _NOT_WEIGHTS.fullmatch(name))


def _transformers_names(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """GGUF name to transformers name, for every weight of the file; none may be left over and none may lack."""
    names = {name: _transformers_name(file, name) for name in file.tensor_names if not _NOT_WEIGHTS.fullmatch(name)}
    missing = sorted(set(_expected_names(config)) - set(names.values()))
    if missing:
        raise ConfigError(f"--model: {file.path} lacks the tensors of {', '.join(missing[:4])} ({len(missing)} in all)")
    return names


def _transformers_name(file: GgufFile, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModelError(f"--model: {file.path}: the decoder has no place for the tensor {name}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _expected_names(config: dict[str, Any]) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    has_head_norms = config["model_type"] == "qwen3"
    for layer in range(config["num_hidden_layers"]):
        for part in _LAYER_NAMES.values():
            if has_head_norms or not part.endswith(("q_norm", "k_norm")):
                yield f"model.layers.{layer}.{part}.weight"


def _write_weights(
    file: GgufFile, names: dict[str, str], config: dict[str, Any], target: Path, advance: Callable[[int], None]
) -> None:
    gguf_names = {name: gguf_name for gguf_name, name in names.items()}

    def tensor(name: str) -> Array:
        values = _undo_permutation(name, file.tensor(gguf_names[name]), config)
        advance(values.nbytes)
        return values

    shapes = {name: file.shape(gguf_name) for name, gguf_name in gguf_names.items()}
    write_safetensors(target / "model.safetensors", shapes, tensor)


def _undo_permutation(name: str, values: Array, config: dict[str, Any]) -> Array:
    """Rows of a llama q or k projection (or bias) back in transformers' order; everything else as it is.

    llama.cpp rotates neighbouring pairs (0, 1), (2, 3), ...; transformers rotates (0, d/2), (1, d/2 + 1), ... For the
    llama architecture convert_hf_to_gguf.py therefore reorders the rows of each head:

        transformers  a0 a1 a2 b0 b1 b2   ->   GGUF  a0 b0 a1 b1 a2 b2
    """
    if config["model_type"] != "llama":
        return values
    if ".q_proj." in name:
        return _unpermute(values, config["num_attention_heads"])
    if ".k_proj." in name:
        return _unpermute(values, config["num_key_value_heads"])
    return values


def _unpermute(values: Array, num_heads: int) -> Array:
    """values: [num_heads * head_dim, ...]."""
    shape: Sequence[int] = values.shape
    pairs = values.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(shape))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
