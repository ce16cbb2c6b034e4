"""A model of the Hugging Face hub: safetensors, config and tokenizer files only, in the hub's own cache."""

from pathlib import Path

from engine.errors import ConfigError, UnsupportedModelError
from engine.progress import say

HUB_TIMEOUT_SECONDS = 10.0

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]


def hub_model(repo_id: str) -> Path:
    """The snapshot directory of `repo_id`. Honours HF_HUB_OFFLINE, HF_TOKEN, HF_HOME and HF_ENDPOINT.

    Raises `ConfigError` naming --model: unknown or gated repository, or hub out of reach and nothing cached.
    """
    # Imported here: it takes a while, and most models come from elsewhere.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached_snapshot(repo_id, "HF_HUB_OFFLINE is set")
    return _download(repo_id)


def _download(repo_id: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    # HTTPError is the base class of the hub's HTTP library, and which library that is depends on the hub's version.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    try:
        # One short question first: snapshot_download alone tries a dead hub several times over.
        info = HfApi().model_info(repo_id, timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise ConfigError(f"--model: {repo_id} is gated; accept its terms and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"--model: the Hugging Face hub has no {repo_id} that HF_TOKEN may read") from error
    except (HTTPError, OSError) as error:
        return _cached_snapshot(repo_id, f"the Hugging Face hub cannot be reached ({_first_line(error)})")
    _require_safetensors(repo_id, [file.rfilename for file in info.siblings or []])
    say(f"fetching {repo_id} from the Hugging Face hub")
    try:
        return Path(snapshot_download(repo_id, revision=info.sha, allow_patterns=_PATTERNS))
    except (HTTPError, OSError) as error:
        raise ConfigError(
            f"--model: the download of {repo_id} broke off ({_first_line(error)}); start again"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _require_safetensors(repo_id: str, files: list[str]) -> None:
    if not any(file.endswith(".safetensors") and "/" not in file for file in files):
        raise UnsupportedModelError(f"--model: {repo_id} has no *.safetensors; other weight formats are not read")


def _cached_snapshot(repo_id: str, why: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"--model: {repo_id} is not cached and {why}") from error
