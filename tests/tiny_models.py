"""Tiny random checkpoints in transformers' format, one for each family and variant that the decoder implements.

Weights are scaled so that logits are far from flat and greedy output wanders: a wrong position, mask or block shows.
Float32, fixed seeds. `save_tiny_model` writes everything a server needs, the tokenizer and chat template included.
"""

import json
import zlib
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = {END_OF_TEXT: 296, IM_START: 297, IM_END: 298, PAD: 299}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# With the 256 bytes and 4 special tokens these make 300.
_PAIRS = "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehiriroicneea"
_MERGES = [_PAIRS[i : i + 2] for i in range(0, len(_PAIRS), 2)]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": SPECIAL_TOKENS[END_OF_TEXT],
    "eos_token_id": SPECIAL_TOKENS[IM_END],
    "tie_word_embeddings": False,
}

_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN_ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-no-groups": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-linear": {"model_type": "llama", **_rope(rope_type="linear", factor=4.0)},
    "llama-dynamic": {"model_type": "llama", **_rope(rope_type="dynamic", factor=2.0)},
    "llama-llama3": {"model_type": "llama", **_rope(**_LLAMA3_ROPE, original_max_position_embeddings=64)},
    "llama-yarn": {"model_type": "llama", **_rope(**_YARN_ROPE)},
    "llama-yarn-mscale": {
        "model_type": "llama",
        **_rope(**_YARN_ROPE, mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, beta_slow=2.0, truncate=False),
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 13},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-window-biases": {
        "model_type": "qwen3",
        "head_dim": 24,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def save_tiny_model(directory: Path, variant: str = "llama", *, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Writes the checkpoint of `variant` with `changes` to its config.json keys; returns `directory`."""
    model = random_model({**_SHAPE, **VARIANTS[variant], **changes})
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    save_tokenizer(directory)
    return directory


def random_model(config: dict[str, Any]) -> Any:
    """The transformers model of `config` with random weights, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(json.dumps(config, sort_keys=True).encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    return model.eval()


def _scaled(name: str, noise: Any) -> Any:
    """Norms about 1, biases small, matrices so that each keeps its input's size and the logits spread over +-5."""
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if "embed" in name:
        return 0.2 * noise
    return (2.0 if "lm_head" in name else 1.5) * noise / noise.shape[-1] ** 0.5


def save_tokenizer(directory: Path) -> None:
    """A byte-level BPE with a few merges: every text encodes, every id below 300 decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *_MERGES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in _MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _SHAPE["max_position_embeddings"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
