"""Flags derived from the frozen configs, and what a bad one looks like."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TypeVar

import tyro

from engine.errors import ConfigError

C = TypeVar("C")

EXIT_BAD_CONFIG = 2


def parse_flags(config: type[C], argv: Sequence[str], prog: str) -> C:
    """`config` from flags: a field `num_blocks`, of a nested config too, is `--num-blocks`; tuples repeat the flag.

    Exits with status 2 on an unknown flag or a value of the wrong type; raises `ConfigError` on a value out of range.
    """
    return tyro.cli(config, args=argv, prog=prog, config=(tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction))


def to_flags(config: object) -> list[str]:
    """The flags that `parse_flags` reads back as `config`. Only what differs from the defaults is written.

    A field that is not in the repr is a secret and is left out: everybody on a machine can read a process's argv.
    """
    flags: list[str] = []
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if not field.repr:
            continue
        if is_dataclass(value):
            flags += to_flags(value)
        elif value != _default_of(field):
            flags += _field_flags(field.name, value)
    return flags


def _default_of(field: "Field[object]") -> object:
    return field.default if field.default is not MISSING else None


def _field_flags(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case bool():
            return [flag if value else f"--no-{name.replace('_', '-')}"]
        case tuple():
            return [word for item in value for word in (flag, str(item))]
        case _:
            return [flag, str(value)]


def run_command(prog: str, command: Callable[[], int]) -> int:
    """Runs `command`; a bad setting is one line on stderr and status 2, anything else unexpected a traceback."""
    try:
        return command()
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
