"""Loading into fused parameters, what is refused by name, and the digest."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from engine.checkpoint_tensors import CheckpointTensors, weights_digest
from engine.errors import ConfigError, UnsupportedModelError
from engine.model_config import ModelConfig
from engine.weights import DecoderWeights, load_weights, resolve_dtype
from tests.tiny_models import save_tiny_model
from tests.unit.conftest import TinyModel

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, ModelConfig.from_checkpoint(directory), dtype)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites the checkpoint's one file with `change` applied to its tensors."""
    path = directory / "model.safetensors"
    # Cloned: the loaded tensors may be views of the file about to be overwritten.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def all_tensors(weights: DecoderWeights) -> list[Tensor]:
    tensors = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [t for name in layer.__slots__ if (t := getattr(layer, name)) is not None]
    return tensors


class TestLoading:
    def test_fuses_in_order(self, tiny_model: Callable[[str], TinyModel]) -> None:
        model = tiny_model("llama-biases")
        layer = load(model.directory).layers[1]
        attention, mlp = model.oracle.model.layers[1].self_attn, model.oracle.model.layers[1].mlp

        expected = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert torch.equal(layer.qkv, expected)
        assert torch.equal(layer.gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        assert layer.gate_up_bias is not None
        assert torch.equal(layer.gate_up_bias, torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]))

    def test_shards_are_one_checkpoint(self, checkpoint: Path, tmp_path: Path) -> None:
        sharded = save_tiny_model(tmp_path / "sharded", max_shard_size="200KB")
        assert len(list(sharded.glob("*.safetensors"))) > 2
        for ours, theirs in zip(all_tensors(load(sharded)), all_tensors(load(checkpoint)), strict=True):
            assert torch.equal(ours, theirs)
        assert weights_digest(sharded) == weights_digest(checkpoint)

    def test_converts(self, checkpoint: Path) -> None:
        exact, rounded = load(checkpoint), load(checkpoint, torch.bfloat16)
        assert {t.dtype for t in all_tensors(rounded)} == {torch.bfloat16}
        assert_close(rounded.layers[0].down, exact.layers[0].down.bfloat16(), atol=0, rtol=0)

    def test_tied_head_is_the_embedding(self, tiny_model: Callable[[str], TinyModel]) -> None:
        weights = load(tiny_model("llama-tied").directory)
        assert weights.head is weights.embedding

    def test_old_rotary_frequencies_are_redundant(self, checkpoint: Path) -> None:
        edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
        load(checkpoint)

    def test_dtype_names(self) -> None:
        assert resolve_dtype("auto") is torch.float32
        assert resolve_dtype("float32") is torch.float32
        assert resolve_dtype("bfloat16") is torch.bfloat16


class TestRefusesByName:
    def test_missing(self, checkpoint: Path) -> None:
        edit(checkpoint, lambda t: t.pop(Q_PROJ))
        with pytest.raises(ConfigError, match=f"lacks {Q_PROJ}"):
            load(checkpoint)

    def test_unexpected(self, checkpoint: Path) -> None:
        edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
        with pytest.raises(ConfigError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias"):
            load(checkpoint)

    def test_many_unexpected_are_counted(self, checkpoint: Path) -> None:
        edit(checkpoint, lambda t: t.update({f"extra.{i}": torch.ones(1) for i in range(7)}))
        with pytest.raises(ConfigError, match=r"extra\.4 and 2 more"):
            load(checkpoint)

    @pytest.mark.parametrize("shape", [(64, 63), (64,), (32, 64)])
    def test_shape(self, checkpoint: Path, shape: tuple[int, ...]) -> None:
        edit(checkpoint, lambda t: t.update({Q_PROJ: torch.ones(shape)}))
        with pytest.raises(ConfigError, match=f"{Q_PROJ} has shape"):
            load(checkpoint)

    def test_integers(self, checkpoint: Path) -> None:
        edit(checkpoint, lambda t: t.update({Q_PROJ: torch.ones(64, 64, dtype=torch.int8)}))
        with pytest.raises(UnsupportedModelError, match=f"{Q_PROJ} is of type"):
            load(checkpoint)

    def test_a_tied_head_that_differs(self, tmp_path: Path) -> None:
        directory = save_tiny_model(tmp_path / "tied", "llama-tied")
        edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        load(directory)
        edit(directory, lambda t: t["lm_head.weight"].add_(1))
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs"):
            load(directory)

    def test_no_weights(self, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
            load(checkpoint)

    def test_a_cut_file(self, checkpoint: Path) -> None:
        path = checkpoint / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
            load(checkpoint)
        with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
            weights_digest(checkpoint)

    @pytest.mark.parametrize("header", [b"", b"3", b"null", b"[]", b'{"a": {}}', b'{"a": 1}', b"[" * 100_000, b"\xff"])
    def test_a_header_that_is_none(self, checkpoint: Path, header: bytes) -> None:
        path = checkpoint / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
        for read in (load, weights_digest):
            with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors: .*header"):
                read(checkpoint)

    @pytest.mark.parametrize("listed", ["absent.safetensors", "../model.safetensors"])
    def test_a_shard_that_is_not_there(self, checkpoint: Path, listed: str) -> None:
        shutil.copy(checkpoint / "model.safetensors", checkpoint.parent)
        (checkpoint / "model.safetensors").rename(checkpoint / "shard.safetensors")
        index = {"weight_map": {Q_PROJ: listed, "lm_head.weight": "shard.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match=f"lists {listed}"):
            load(checkpoint)

    def test_a_tensor_in_two_shards(self, checkpoint: Path) -> None:
        data = (checkpoint / "model.safetensors").read_bytes()
        (checkpoint / "model.safetensors").unlink()
        for shard in ("a.safetensors", "b.safetensors"):
            (checkpoint / shard).write_bytes(data)
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match="another file of the checkpoint holds too"):
            CheckpointTensors(checkpoint)


class TestDigest:
    def test_tells_values_apart_at_the_start_the_middle_and_the_end(self, checkpoint: Path) -> None:
        seen = {weights_digest(checkpoint)}
        for index in (0, 112 * 64 // 2, 112 * 64 - 1):
            edit(checkpoint, lambda t, at=index: t["model.layers.2.mlp.up_proj.weight"].view(-1)[at].add_(1))
            seen.add(weights_digest(checkpoint))
        assert len(seen) == 4

    def test_tells_shape_and_type_apart(self, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        edit(checkpoint, lambda t: t.update({Q_PROJ: t[Q_PROJ].view(32, 128)}))
        reshaped = weights_digest(checkpoint)
        edit(checkpoint, lambda t: t.update({Q_PROJ: t[Q_PROJ].view(torch.int32)}))
        assert len({before, reshaped, weights_digest(checkpoint)}) == 3

    def test_metadata_does_not_count(self, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        path = checkpoint / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"made_by": "another tool"})
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"made_by": "another tool"}
        assert weights_digest(checkpoint) == before
