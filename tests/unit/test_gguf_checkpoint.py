"""GGUF to checkpoint directory, compared with the transformers model that the file was made from."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine import gguf_checkpoint
from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_checkpoint import checkpoint_bytes, convert_gguf
from engine.gguf_config import llama3_factors
from engine.model_source import cached_builtin
from tests.gguf_builder import permute, tiny_llama, write_model

Q = gguf.GGMLQuantizationType


def convert(source, tmp_path):
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(source, target)
    return target


def weights_of(model):
    tied = model.config.tie_word_embeddings
    return {n: t.numpy() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def logits_of(model, num_tokens=12):
    with torch.no_grad():
        return model(torch.arange(3, 3 + num_tokens).unsqueeze(0)).logits


def tiny_qwen(kind):
    settings = {
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": kind == "qwen2",
    }
    torch.manual_seed(0)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=16))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            parameter.data.normal_(1.0, 0.5)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_llama_weights_and_logits_come_back(tmp_path, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    target = convert(write_model(tmp_path / "m.gguf", model), tmp_path)
    weights = load_file(target / "model.safetensors")
    expected = weights_of(model)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights[name], tensor, err_msg=name)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    assert loaded.config.tie_word_embeddings is tied
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=0)


def test_biases_of_a_llama_are_permuted_back_too(tmp_path):
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    target = convert(write_model(tmp_path / "m.gguf", model), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=0)


def test_a_head_size_of_its_own_comes_back(tmp_path):
    model = tiny_llama(head_dim=16)
    target = convert(write_model(tmp_path / "m.gguf", model), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_is_not_permuted(tmp_path, kind):
    model = tiny_qwen(kind)
    target = convert(write_model(tmp_path / "m.gguf", model, architecture=kind), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    assert loaded.config.model_type == kind
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda q: q.name)
def test_quantised_weights_are_dequantised_exactly(tmp_path, qtype):
    model = tiny_llama()
    target = convert(write_model(tmp_path / "m.gguf", model, qtype=qtype), tmp_path)
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    original = weights_of(model)[name]
    # Quantising works on rows, and the permutation moves whole rows: the order of the two does not matter.
    expected = gguf.dequantize(gguf.quantize(original, qtype), qtype)
    assert weights[name].dtype == np.float32
    np.testing.assert_array_equal(weights[name], expected)
    assert np.abs(weights[name] - original).max() < 0.02


def test_permutation_is_a_permutation_of_rows():
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    permuted = permute(rows, 2)
    assert permuted.flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(gguf_checkpoint._unpermute(permuted, 2), rows)


def test_progress_counts_every_byte_and_each_tensor_is_let_go(tmp_path):
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    written = []
    convert_gguf(source, tmp_path, written.append)
    assert len(written) == len(load_file(tmp_path / "model.safetensors"))
    assert sum(written) == checkpoint_bytes(source)


def test_config_is_what_the_model_was_made_with(tmp_path):
    target = convert(write_model(tmp_path / "m.gguf", tiny_llama(rope_theta=1e5)), tmp_path)
    config = json.loads((target / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e5
    assert config["rope_scaling"] is None
    assert config["vocab_size"] == 288
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 1)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 1


def test_end_of_turn_ends_a_reply_too(tmp_path):
    metadata = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 1}
    target = convert(write_model(tmp_path / "m.gguf", tiny_llama(), extra_metadata=metadata), tmp_path)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [1, 7]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def llama_cpp_rope_freqs(theta, head_dim, factor):
    """LlamaModel.generate_extra_tensors of convert_hf_to_gguf.py, with its three cases."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_frequency_factors(tmp_path, factor):
    rope = {**LLAMA3, "factor": factor}
    model = tiny_llama(rope_parameters=rope, head_dim=32, max_position_embeddings=131072)
    freqs = llama_cpp_rope_freqs(500000.0, 32, factor)
    np.testing.assert_allclose(llama3_factors(500000.0, 32, factor), freqs, rtol=1e-6)
    source = write_model(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": freqs})
    loaded = AutoModelForCausalLM.from_pretrained(convert(source, tmp_path)).eval()
    assert loaded.config.rope_parameters == rope
    torch.testing.assert_close(logits_of(loaded, 60), logits_of(model, 60), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            },
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.factor": 4.0,
                "{arch}.rope.scaling.original_context_length": 32,
            },
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rope_scaling_comes_back(tmp_path, rope, metadata):
    model = tiny_llama(rope_parameters=rope)
    source = write_model(tmp_path / "m.gguf", model, extra_metadata=metadata)
    loaded = AutoModelForCausalLM.from_pretrained(convert(source, tmp_path)).eval()
    torch.testing.assert_close(logits_of(loaded, 60), logits_of(model, 60), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"extra_metadata": {"{arch}.expert_count": 8}}, "expert_count"),
        ({"extra_metadata": {"{arch}.attention.sliding_window": 16}}, "sliding-window"),
        ({"extra_metadata": {"{arch}.rope.scaling.type": "longrope", "{arch}.rope.scaling.factor": 2.0}}, "longrope"),
        ({"extra_metadata": {"{arch}.rope.dimension_count": 4}}, "rotates 4 of 8"),
        ({"extra_metadata": {"{arch}.attention.causal": False}}, "causal"),
        ({"extra_metadata": {"split.count": 3}}, "split"),
        ({"extra_tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "rope_freqs"),
        ({"extra_tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}}, "ffn_gate_inp"),
        ({"extra_tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, changes, named):
    source = write_model(tmp_path / "m.gguf", tiny_llama(), **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        convert(source, tmp_path)


def test_unknown_architecture_is_refused_by_name(tmp_path):
    source = write_model(tmp_path / "m.gguf", tiny_llama(), architecture="gemma2")
    with pytest.raises(UnsupportedModelError, match="gemma2"):
        convert(source, tmp_path)


def test_missing_tensors_are_named(tmp_path):
    source = write_model(tmp_path / "m.gguf", tiny_llama(), without=("blk.1.ffn_up.weight",))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(source, tmp_path)


@pytest.mark.parametrize("damage", ["not gguf", "cut", "empty"])
def test_damaged_files_are_config_errors(tmp_path, damage):
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    content = source.read_bytes()
    source.write_bytes({"not gguf": b"PK" + content, "cut": content[: len(content) // 2], "empty": b""}[damage])
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        convert(source, tmp_path)


@pytest.mark.demo_model
def test_the_converted_demo_model_knows_the_capital_of_france():
    path = cached_builtin("smollm2-135m")
    assert path is not None, "run `pdserve model fetch smollm2-135m` first"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
