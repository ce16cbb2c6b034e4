"""The one console command, `pdserve`; `COMMANDS` is what it can do. Each part is imported when called."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    "up": ("deploy.up", "start a whole ring on this machine"),
    "server": ("server.__main__", "the OpenAI-compatible HTTP server"),
    "prefill": ("prefill_node.__main__", "a prefill node"),
    "decode": ("decode_node.__main__", "a decode node"),
    "loadtest": ("loadtest.__main__", "a load test of any OpenAI-compatible server"),
    "model": ("deploy.model_command", "fetch, list and locate models"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case [] | ["-h" | "--help"]:
            print(_usage())
            return 0
        case ["--version"]:
            print(f"pdserve {version('pdserve')}")
            return 0
        case [name, *rest] if name in COMMANDS:
            status: int = importlib.import_module(COMMANDS[name][0]).main(rest)
            return status
        case [name, *_]:
            print(f"pdserve: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
            return 2
    raise AssertionError("unreachable")


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: pdserve COMMAND [FLAGS]   (pdserve COMMAND --help lists the flags)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
