"""Flags derived from the frozen configs, and what a bad one looks like."""

import sys
from collections.abc import Callable, Sequence
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


def run_command(prog: str, command: Callable[[], int]) -> int:
    """Runs `command`; a bad setting is one line on stderr and status 2, anything else unexpected a traceback."""
    try:
        return command()
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
