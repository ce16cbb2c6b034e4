"""GGUF metadata to transformers' config.json and generation_config.json, refusing by name what is not implemented."""

from typing import Any

import numpy as np

from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_file import GgufFile

_MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# What Llama 3.1, 3.2 and 3.3 were trained with. GGUF keeps only the resulting factor of each frequency, so these are
# tried and the outcome compared with the file's factors.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT = 8192


def checkpoint_config(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises `UnsupportedModelError` naming the metadata that the decoder does not implement."""
    _refuse_unsupported(file)
    vocab_size, hidden_size = file.shape("token_embd.weight") if "token_embd.weight" in file.tensor_names else (0, 0)
    num_heads = _head_count(file, "attention.head_count")
    head_dim = int(file.get_of_architecture("attention.key_length", hidden_size // num_heads))
    return {
        "architectures": [_MODEL_CLASSES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(file.require_of_architecture("feed_forward_length")),
        "num_hidden_layers": int(file.require_of_architecture("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _head_count(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(file.require_of_architecture("context_length")),
        "rms_norm_eps": _float(file.require_of_architecture("attention.layer_norm_rms_epsilon")),
        "rope_theta": _float(file.get_of_architecture("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": _has_attention_bias(file),
        **({"mlp_bias": _has_mlp_bias(file)} if file.architecture == "llama" else {}),
        **special_token_ids(file),
        "dtype": "float32",
        "use_cache": True,
    }


def generation_config(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: every token that ends a reply, the end of turn and of message among them."""
    ids = special_token_ids(file)
    ends = [ids.get("eos_token_id"), *(file.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom"))]
    eos_token_ids = list(dict.fromkeys(int(end) for end in ends if end is not None))
    if eos_token_ids:
        ids["eos_token_id"] = eos_token_ids if len(eos_token_ids) > 1 else eos_token_ids[0]
    return ids


def special_token_ids(file: GgufFile) -> dict[str, Any]:
    """bos, eos and pad ids that the file names, under transformers' names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(token_id) for name, token_id in ids.items() if token_id is not None}


def _refuse_unsupported(file: GgufFile) -> None:
    if file.architecture not in _MODEL_CLASSES:
        raise UnsupportedModelError(
            f"--model: {file.path} has the architecture {file.architecture}; known are {', '.join(_MODEL_CLASSES)}"
        )
    context_length = int(file.require_of_architecture("context_length"))
    if int(file.get_of_architecture("expert_count", 0)) > 0:
        raise UnsupportedModelError(f"--model: {file.path} is a mixture of experts ({file.architecture}.expert_count)")
    window = int(file.get_of_architecture("attention.sliding_window", 0) or 0)
    if 0 < window < context_length:
        raise UnsupportedModelError(f"--model: {file.path} has sliding-window attention ({window} tokens)")
    if not file.get_of_architecture("attention.causal", True):
        raise UnsupportedModelError(
            f"--model: {file.path} is not a causal model ({file.architecture}.attention.causal)"
        )


def _head_count(file: GgufFile, key: str, default: int | None = None) -> int:
    count = file.require_of_architecture(key) if default is None else file.get_of_architecture(key, default)
    if isinstance(count, list):
        if len(set(count)) != 1:
            raise UnsupportedModelError(f"--model: {file.path}: {file.architecture}.{key} differs between layers")
        count = count[0]
    if int(count) < 1:
        raise ConfigError(f"--model: {file.path}: {file.architecture}.{key} is {count}")
    return int(count)


def _float(value: float) -> float:
    """A float32 of the file as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _has_attention_bias(file: GgufFile) -> bool:
    """Whether q, k, v (and, outside qwen2, o) projections have biases; a mixture has no name in config.json."""
    parts = ["attn_q", "attn_k", "attn_v"]
    if file.architecture != "qwen2":
        parts.append("attn_output")
    return _all_or_none(file, parts)


def _has_mlp_bias(file: GgufFile) -> bool:
    return _all_or_none(file, ["ffn_gate", "ffn_up", "ffn_down"])


def _all_or_none(file: GgufFile, parts: list[str]) -> bool:
    names = set(file.tensor_names)
    num_layers = int(file.require_of_architecture("block_count"))
    present = {f"blk.{layer}.{part}.bias" in names for layer in range(num_layers) for part in parts}
    if len(present) > 1:
        raise UnsupportedModelError(f"--model: {file.path}: only some of {', '.join(parts)} have a bias")
    return present == {True}


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """config.json's `rope_scaling`; None for plain rotary embeddings."""
    rotated = int(file.get_of_architecture("rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise UnsupportedModelError(f"--model: {file.path} rotates {rotated} of {head_dim} dimensions of a head")
    kind = file.get_of_architecture("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensor_names:
        return _llama3_scaling(file, head_dim)
    if kind == "none":
        return None
    factor = _float(file.require_of_architecture("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(file.require_of_architecture("rope.scaling.original_context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(f"--model: {file.path} has rope scaling of type {kind}; known are linear and yarn")


def _llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, Any]:
    factors = file.tensor("rope_freqs.weight")
    factor = float(factors.max())
    expected = llama3_factors(_float(file.get_of_architecture("rope.freq_base", 10000.0)), head_dim, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(f"--model: {file.path}: rope_freqs.weight is not the scaling of any Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each of the head_dim / 2 frequencies is divided by; as in convert_hf_to_gguf.py and transformers."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    context = _LLAMA3_ORIGINAL_CONTEXT
    low, high = _LLAMA3_LOW_FREQ_FACTOR, _LLAMA3_HIGH_FREQ_FACTOR
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return factors
