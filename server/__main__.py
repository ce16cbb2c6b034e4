"""`pdserve server`: flags to config, build, run, exit code."""

import gc
import logging
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from connector import failpoints
from connector.link import Links
from connector.parent_link import ParentLink
from connector.zmq_link import ZmqLinks
from engine.flags import parse_flags, run_command
from engine.model_source import resolve_model
from server.api_keys import ENVIRONMENT_VARIABLE, ApiKeys, read_api_keys
from server.app import create_app
from server.config import ServerConfig
from server.http_server import HttpServer, bind, url_of
from server.model_assets import load_model_assets
from server.service import Service
from server.tls import tls_context

logger = logging.getLogger(__name__)

PROG = "pdserve server"


def main(argv: Sequence[str]) -> int:
    """Serves until a signal."""
    return run_command(PROG, lambda: run(parse_flags(ServerConfig, argv, PROG)))


def run(config: ServerConfig) -> int:
    """Raises `ConfigError` before anything is started. The port comes first: it is what most often is taken."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    failpoints.arm_from_environment()
    keys = read_api_keys(config.access, os.environ.get(ENVIRONMENT_VARIABLE, ""))
    tls = tls_context(config.tls)
    parent = None if config.parent_fd is None else ParentLink(config.parent_fd)
    with bind(config.host, config.port) as listener:
        service = Service(config, load_model_assets(resolve_model(config.model), config.chat.tool_call_parser))
        logger.info("tool calls are read by %s", service.assets.tool_parser.__name__)
        links = ZmqLinks("server")
        try:
            _serve(service, links, Door(listener, keys, tls), parent)
        finally:
            links.close()
    return 0


@dataclass(frozen=True, slots=True)
class Door:
    """Where clients come in, and what they must bring."""

    listener: socket.socket
    keys: ApiKeys
    tls: ssl.SSLContext | None


def _serve(service: Service, links: Links, door: Door, parent: ParentLink | None) -> None:
    url = url_of(door.listener, "http" if door.tls is None else "https")

    def on_listening() -> None:
        logger.info("listening on %s, %s", url, f"{len(door.keys)} API keys" if door.keys else "open to everybody")
        if parent is not None:
            parent.announce({"url": url})

    server = HttpServer(
        create_app(service, links, door.keys),
        drain=service.drain,
        on_listening=on_listening,
        limits=service.config.limits,
        tls=door.tls,
    )
    if parent is not None:
        parent.watch(server.stop)
    # What exists now lives as long as the process: to look at it again would stop all streams for a tenth of a second.
    gc.collect()
    gc.freeze()
    server.run(sockets=[door.listener])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
