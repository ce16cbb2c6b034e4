"""`pdserve decode`: flags to config, run, exit code."""

import sys
from collections.abc import Sequence

from connector.node import NodeAddresses, run_node
from connector.node_config import DecodeNodeConfig
from engine.flags import parse_flags, run_command

PROG = "pdserve decode"


def main(argv: Sequence[str]) -> int:
    return run_command(PROG, lambda: _run(parse_flags(DecodeNodeConfig, argv, PROG)))


def _run(config: DecodeNodeConfig) -> int:
    addresses = NodeAddresses(
        listen=config.listen, admin_port=config.admin_port, kv_listen=config.kv_listen, prefill=config.prefill
    )
    return run_node("decode", config, addresses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
