"""What each process of a local ring is told: its settings, its CPUs, its neighbours. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from connector.node_config import DecodeNodeConfig, PrefillNodeConfig
from deploy.up_config import UpConfig
from server.api_keys import ENVIRONMENT_VARIABLE
from server.config import ServerConfig

ANY_PORT = "tcp://127.0.0.1:0"


def prefill_config(config: UpConfig, index: int, cpus: tuple[int, ...]) -> PrefillNodeConfig:
    settings = _node_settings(config, f"prefill-{index}", cpus)
    return PrefillNodeConfig(**settings, listen=ANY_PORT, kv_listen=ANY_PORT, admin_port=0)


def decode_config(
    config: UpConfig, index: int, cpus: tuple[int, ...], prefill_kv_addresses: Sequence[str]
) -> DecodeNodeConfig:
    settings = _node_settings(config, f"decode-{index}", cpus)
    return DecodeNodeConfig(**settings, listen=ANY_PORT, prefill=tuple(prefill_kv_addresses), admin_port=0)


def server_config(config: UpConfig, *, prefill: Sequence[str], decode: Sequence[str]) -> ServerConfig:
    return ServerConfig(
        model=config.model,
        served_model_name=config.served_model_name,
        decode=tuple(decode),
        prefill=tuple(prefill),
        host=config.host,
        port=config.port,
        access=replace(config.access, api_key=()),
        tls=config.tls,
        cors=config.cors,
        limits=config.limits,
        chat=config.chat,
        log_level=config.log_level,
    )


def server_environment(config: UpConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Everybody on the machine can read argv: keys given as flags go on by environment, to the server alone."""
    keys = [*inherited.get(ENVIRONMENT_VARIABLE, "").split(), *config.access.api_key]
    return node_environment(inherited) | ({ENVIRONMENT_VARIABLE: " ".join(keys)} if keys else {})


def node_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in inherited.items() if name != ENVIRONMENT_VARIABLE}


def plan_cpus(num_nodes: int, available: Sequence[int]) -> list[tuple[int, ...]]:
    """A disjoint share of `available` for each node, as even as can be, neighbours together: prefill must not slow
    decode down.

    Empty shares, meaning "anywhere", where there are more nodes than CPUs. The server is never bound: it is mostly
    asleep, and the system finds it a core.
    """
    if num_nodes > len(available):
        return [()] * num_nodes
    size, extra = divmod(len(available), num_nodes)
    shares, start = [], 0
    for node in range(num_nodes):
        end = start + size + (node < extra)
        shares.append(tuple(available[start:end]))
        start = end
    return shares


def _node_settings(config: UpConfig, name: str, cpus: tuple[int, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "model": config.model_options,
        "cache": config.cache,
        "scheduler": config.scheduler,
        "transfer": config.transfer,
        "cpus": cpus,
        # Without CPUs of its own a node must not start as many threads as the machine has.
        "num_threads": config.num_threads or (None if cpus else 1),
        # The server goes first and ends its streams: there is nothing left to wait for.
        "drain_timeout": 0.5,
        "debug_state": config.debug_state,
        "log_level": config.log_level,
    }
