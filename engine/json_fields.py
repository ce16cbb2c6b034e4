"""Typed access to a JSON object of a checkpoint: every error names the file and the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from engine.errors import ConfigError


class JsonFields:
    """One JSON object. An absent key and one that is null are the same: the default, or an error without one."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, path: Path) -> "JsonFields":
        """Raises `ConfigError` if `path` does not hold a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(values, str(path))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{self.source}: {name} must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.source}: {name} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value

    def object(self, name: str) -> "JsonFields":
        """A nested object; empty when absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} must be an object, got {value!r}")
        return JsonFields(cast(dict[str, Any], value), f"{self.source}: {name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.source}: {name} is missing")
        return value
