"""config.json in the forms transformers writes and wrote, and everything that must be refused."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, UnsupportedModelError
from engine.model_config import ModelConfig, resolve_max_model_len

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


def read_config(
    directory: Path, family: str = "llama", *, without: tuple[str, ...] = (), **changes: Any
) -> ModelConfig:
    values = {**FAMILIES[family], **changes}
    for name in without:
        del values[name]
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_checkpoint(directory)


class TestShape:
    def test_fields(self, tmp_path: Path) -> None:
        config = read_config(tmp_path)
        assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (100, 64, 96, 4)
        assert (config.num_heads, config.num_kv_heads, config.heads_per_kv_head, config.head_dim) == (8, 2, 4, 8)
        assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
        assert not config.tie_word_embeddings

    def test_head_dim_of_its_own(self, tmp_path: Path) -> None:
        assert read_config(tmp_path, head_dim=32).head_dim == 32
        assert read_config(tmp_path, head_dim=None).head_dim == 8

    @pytest.mark.parametrize(("family", "num_kv_heads"), [("llama", 8), ("mistral", 8), ("qwen2", 32), ("qwen3", 32)])
    def test_default_kv_heads(self, tmp_path: Path, family: str, num_kv_heads: int) -> None:
        changes = {"num_attention_heads": 32} if num_kv_heads == 32 else {}
        assert read_config(tmp_path, family, without=("num_key_value_heads",), **changes).num_kv_heads == num_kv_heads
        assert read_config(tmp_path, family, num_key_value_heads=None).num_kv_heads == 8

    def test_family_by_architecture_alone(self, tmp_path: Path) -> None:
        assert read_config(tmp_path, "qwen3", without=("model_type",)).family == "qwen3"
        assert read_config(tmp_path, "qwen3", without=("architectures",)).family == "qwen3"

    def test_kv_bytes_per_token(self, tmp_path: Path) -> None:
        assert read_config(tmp_path).kv_bytes_per_token(2) == 4 * 2 * 2 * 8 * 2

    @pytest.mark.parametrize(
        ("family", "changes", "biases"),
        [
            ("llama", {}, (False, False, False)),
            ("llama", {"attention_bias": True}, (True, True, False)),
            ("llama", {"mlp_bias": True}, (False, False, True)),
            ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
            ("qwen2", {}, (True, False, False)),
            ("qwen3", {"attention_bias": True}, (True, True, False)),
        ],
    )
    def test_biases(
        self, tmp_path: Path, family: str, changes: dict[str, Any], biases: tuple[bool, bool, bool]
    ) -> None:
        config = read_config(tmp_path, family, **changes)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases

    def test_end_tokens_of_both_files(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
        assert read_config(tmp_path, eos_token_id=3).eos_token_ids == {3, 5, 7}
        assert read_config(tmp_path, eos_token_id=None).eos_token_ids == {5, 7}

    def test_needs_no_torch(self) -> None:
        code = "import sys, engine.model_config; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestWindows:
    @pytest.mark.parametrize(
        ("family", "changes", "windows"),
        [
            ("llama", {"sliding_window": 9}, (None, None, None, None)),
            ("mistral", {}, (4096,) * 4),
            ("mistral", {"sliding_window": None}, (None,) * 4),
            ("mistral", {"sliding_window": 9}, (9,) * 4),
            ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, (None,) * 4),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9, 9)),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, (9,) * 4),
            ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
            ("qwen3", {"use_sliding_window": True}, (None,) * 4),
            ("llama", {"layer_types": ["full_attention"] * 4}, (None,) * 4),
        ],
    )
    def test_per_layer(
        self, tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
    ) -> None:
        config = read_config(tmp_path, family, **changes)
        assert config.layer_windows == windows
        assert config.windows == set(windows)

    def test_layer_types_come_first(self, tmp_path: Path) -> None:
        types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
        config = read_config(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, layer_types=types)
        assert config.layer_windows == (9, None, None, 9)


class TestRope:
    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500}},
        ],
    )
    def test_old_and_new_form(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        rope = read_config(tmp_path, **changes).rope
        assert (rope.kind, rope.theta, rope.factor) == ("linear", 500.0, 2.0)

    def test_default(self, tmp_path: Path) -> None:
        assert read_config(tmp_path, rope_scaling=None).rope.theta == 10_000.0
        assert read_config(tmp_path, rope_theta=77.0).rope.theta == 77.0

    def test_yarn_attention_factor(self, tmp_path: Path) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        rope = read_config(tmp_path, rope_scaling=yarn).rope
        assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
        assert rope.original_max_position_embeddings == 128
        assert read_config(tmp_path, rope_scaling={**yarn, "attention_factor": 1.5}).rope.attention_factor == 1.5

    def test_original_length_beside_the_parameters_wins(self, tmp_path: Path) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        config = read_config(tmp_path, rope_scaling=yarn, original_max_position_embeddings=64)
        assert config.rope.original_max_position_embeddings == 64


class TestRefuses:
    @pytest.mark.parametrize(
        ("family", "changes", "named"),
        [
            ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
            ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
            ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
            ("llama", {"is_causal": False}, "is_causal"),
            ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "auto_map"),
            ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ("llama", {"rope_interleaved": True}, "rope_interleaved"),
            ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
            ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
            ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
            ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
            ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
            ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ],
    )
    def test_what_is_not_implemented(self, tmp_path: Path, family: str, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedModelError, match=named):
            read_config(tmp_path, family, **changes)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"vocab_size": None}, "vocab_size is missing"),
            ({"hidden_size": "64"}, "hidden_size must be an integer >= 1, got '64'"),
            ({"num_key_value_heads": 3}, "num_key_value_heads, got 3"),
            ({"head_dim": 7}, "head_dim must be even"),
            ({"rms_norm_eps": 0}, "rms_norm_eps"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
            ({"eos_token_id": "x"}, "eos_token_id"),
            ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ],
    )
    def test_malformed(self, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            read_config(tmp_path, **changes)

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"config\.json: No such file"):
            ModelConfig.from_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="is not JSON"):
            ModelConfig.from_checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(ConfigError, match="must hold a JSON object"):
            ModelConfig.from_checkpoint(tmp_path)


class TestDigest:
    def test_changes_with_the_numbers_only(self, tmp_path: Path) -> None:
        config = read_config(tmp_path)
        for change in (
            {"rms_norm_eps": 1e-6},
            {"rope": replace(config.rope, theta=5.0)},
            {"layer_windows": (None, None, None, 3)},
            {"qkv_bias": True},
        ):
            assert replace(config, **change).digest() != config.digest()
        assert replace(config, eos_token_ids=frozenset({1})).digest() == config.digest()

    def test_is_the_same_in_every_process(self, tmp_path: Path) -> None:
        code = (
            "import sys, pathlib, engine.model_config as m;"
            "print(m.ModelConfig.from_checkpoint(pathlib.Path(sys.argv[1])).digest())"
        )
        digest = read_config(tmp_path, eos_token_id=[1, 2]).digest()
        told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
        assert told.stdout.strip() == digest


class TestMaxModelLen:
    def test_default_is_what_model_and_cache_allow(self, tmp_path: Path) -> None:
        config = read_config(tmp_path)
        assert resolve_max_model_len(config, None) == 512
        assert resolve_max_model_len(config, None, num_cache_tokens=300) == 300
        assert resolve_max_model_len(config, None, num_cache_tokens=3000) == 512
        assert resolve_max_model_len(config, 200, num_cache_tokens=300) == 200

    def test_more_is_refused(self, tmp_path: Path) -> None:
        config = read_config(tmp_path)
        assert resolve_max_model_len(config, 512) == 512
        with pytest.raises(ConfigError, match="--max-model-len must be at most the model's 512 positions, got 513"):
            resolve_max_model_len(config, 513)
        with pytest.raises(ConfigError, match="--max-model-len must be at most the 300 tokens"):
            resolve_max_model_len(config, 301, num_cache_tokens=300)
