"""`pdserve model fetch | list | path`: the models that come with a name of their own."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from engine.errors import ConfigError
from engine.model_source import BUILTIN_MODELS, cached_builtin, resolve_model

_CONFIG_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Fetch and convert a model now, so that a later start finds it ready; print its directory."""

    name: Annotated[str, tyro.conf.Positional]
    """Built-in name, Hugging Face id or .gguf file."""

    def run(self) -> None:
        print(resolve_model(self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """List the built-in models."""

    def run(self) -> None:
        for model in BUILTIN_MODELS.values():
            print(f"{model.name}\t{cached_builtin(model.name) or 'not fetched'}\t{model.summary}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Print the directory of a built-in model that was fetched before; fetches nothing."""

    name: Annotated[str, tyro.conf.Positional]
    """Built-in name."""

    def run(self) -> None:
        path = cached_builtin(self.name)
        if path is None:
            raise ConfigError(f"{self.name} has not been fetched; run `pdserve model fetch {self.name}`")
        print(path)


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code. 2: wrong arguments, or a model that cannot be had."""
    try:
        command = tyro.cli(
            Fetch | List | Path,
            args=argv,
            prog="pdserve model",
            description=__doc__,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction),
        )
        command.run()
    except ConfigError as error:
        print(f"pdserve model: {error}", file=sys.stderr)
        return _CONFIG_ERROR
    except SystemExit as done:  # tyro's own: help, or arguments it does not know
        return done.code if isinstance(done.code, int) else 0
    return 0
