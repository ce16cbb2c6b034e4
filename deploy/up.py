"""`pdserve up`: flags to config, run, exit code."""

from collections.abc import Sequence

from deploy.launcher import run_up
from deploy.up_config import UpConfig
from engine.flags import parse_flags, run_command

PROG = "pdserve up"


def main(argv: Sequence[str]) -> int:
    return run_command(PROG, lambda: run_up(parse_flags(UpConfig, argv, PROG)))
