"""Connectors by name. Registration stores strings; the module is imported when a connector is first made."""

import importlib
from dataclasses import dataclass
from typing import Protocol

from connector.kv_sender import GrantTaker
from connector.link import Links
from connector.p2p_worker import P2PPlace
from engine.errors import ConfigError
from engine.kv_connector import SchedulerConnector, WorkerConnector


@dataclass(frozen=True, slots=True)
class KVConnector:
    """The two ends of one connector."""

    scheduler: SchedulerConnector
    worker: WorkerConnector


class ConnectorMaker(Protocol):
    """What a registered name must lead to."""

    def __call__(self, place: P2PPlace, links: Links, taker: GrantTaker) -> KVConnector: ...


_registered: dict[str, str] = {}


def register_connector(name: str, path: str) -> None:
    """`path` is "module:callable", a `ConnectorMaker`. Raises `ConfigError` if the name is taken."""
    if name in _registered:
        raise ConfigError(f"connector {name!r} is registered already ({_registered[name]}); known: {_known()}")
    _registered[name] = path


def create_connector(name: str, place: P2PPlace, links: Links, taker: GrantTaker) -> KVConnector:
    """`name` is a registered one or an outside "module:callable"."""
    path = _registered.get(name, name)
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"--kv-connector {name!r} is not known; known: {_known()}, or module:callable")
    try:
        maker: ConnectorMaker = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--kv-connector {name!r} cannot be imported: {error}") from error
    return maker(place, links, taker)


def _known() -> str:
    return ", ".join(sorted(_registered))


register_connector("p2p", "connector.p2p:make_p2p_connector")
