"""Builders of tiny GGUF files, written the way llama.cpp's convert_hf_to_gguf.py does."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.gguf_checkpoint import _LAYER_NAMES
from engine.gguf_tokenizer import TokenType

BYTES = list(bytes_to_unicode().values())
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tiny_llama(**changes) -> LlamaForCausalLM:
    """A random float32 model whose matrices have rows of 32: one quantisation block."""
    settings = {
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "llama",
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra_metadata: dict[str, object] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """`model` as a GGUF file whose matrices have the type `qtype`; `without` names GGUF tensors to leave out."""
    writer = gguf.GGUFWriter(path, architecture)
    _write_hyperparameters(writer, model.config)
    write_byte_level_tokenizer(writer, model.config.vocab_size)
    _write_extra(writer, architecture, extra_metadata or {})
    for name, tensor in {**_tensors(model, architecture), **(extra_tensors or {})}.items():
        if name not in without:
            _add_tensor(writer, name, tensor, qtype)
    return _close(writer, path)


def write_metadata(path: Path, *, architecture: str = "llama", fill) -> Path:
    """A GGUF file without tensors; `fill(writer)` writes its metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    return _close(writer, path)


def write_byte_level_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str = "smollm") -> None:
    """256 bytes, a few merges, two control tokens, one user-defined token, padded to `vocab_size`."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "' s"]
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|im_start|>", "<|im_end|>", *BYTES, *joined, "<think>"]
    types = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.USER_DEFINED]
    num_padding = vocab_size - len(tokens)
    tokens += [f"[PAD{i}]" for i in range(num_padding)]
    types += [TokenType.UNUSED] * num_padding
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    pairs = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def _write_hyperparameters(writer: gguf.GGUFWriter, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_extra(writer: gguf.GGUFWriter, architecture: str, metadata: dict[str, object]) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        write = writer.add_array if isinstance(value, list) else kinds[type(value)]
        write(key.format(arch=architecture), value)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        gguf_name = _gguf_name(name)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.detach().numpy()
        part = gguf_name.split(".")[2] if gguf_name.startswith("blk.") else ""
        if architecture == "llama" and part in heads:
            array = permute(array, heads[part])
        tensors[gguf_name] = array
    return tensors


def _gguf_name(name: str) -> str:
    known = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in known:
        return known[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    by_transformers_name = {value: key for key, value in _LAYER_NAMES.items()}
    return f"blk.{layer}.{by_transformers_name[part]}.{kind}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, qtype: gguf.GGMLQuantizationType) -> None:
    if tensor.ndim == 1 or qtype == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, tensor.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(tensor.astype(np.float32), qtype), raw_dtype=qtype)


def _close(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
