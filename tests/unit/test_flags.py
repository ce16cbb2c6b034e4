from pathlib import Path

import pytest

from connector.node_config import DecodeNodeConfig, PrefillNodeConfig
from connector.transfer_settings import TransferSettings
from deploy.ring_plan import decode_config, plan_cpus, prefill_config, server_config
from deploy.up_config import UpConfig
from engine.config import CacheConfig, ModelOptions, SchedulerConfig
from engine.errors import ConfigError
from engine.flags import parse_flags, run_command, to_flags
from server.config import ServerConfig

CONFIGS = [
    UpConfig(),
    UpConfig(
        model="m",
        port=0,
        served_model_name=("a", "b"),
        cache=CacheConfig(block_size=8, enable_prefix_caching=False),
        ready_file=Path("ready.json"),
        pin_cpus=False,
    ),
    ServerConfig(model="m", decode=("tcp://a:1", "tcp://b:2"), prefill=("tcp://c:3",)),
    prefill_config(UpConfig(debug_state=True), 1, (0,)),
    decode_config(UpConfig(transfer=TransferSettings(transport="zmq", peer_timeout=2.5)), 0, (), ["tcp://p:1"]),
    DecodeNodeConfig(
        model=ModelOptions(model="m", dtype="bfloat16", max_model_len=64),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_flags_read_back_as_the_config_they_were_made_of(config: object):
    assert parse_flags(type(config), to_flags(config), "test") == config


def test_only_what_differs_from_the_defaults_is_written():
    assert to_flags(PrefillNodeConfig(model=ModelOptions(model="m"))) == ["--model", "m"]


def test_a_bad_setting_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]):
    def command() -> int:
        raise ConfigError("--port must be free")

    assert run_command("pdserve up", command) == 2
    assert capsys.readouterr().err == "pdserve up: --port must be free\n"


@pytest.mark.parametrize(
    ("num_nodes", "cpus", "shares"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (2, [0, 1, 2], [(0, 1), (2,)]),
        (1, [3, 4], [(3, 4)]),
        (3, [0, 1], [(), (), ()]),
        (2, [], [(), ()]),
    ],
)
def test_nodes_share_no_cpu_if_there_are_enough(num_nodes: int, cpus: list[int], shares: list[tuple[int, ...]]):
    assert plan_cpus(num_nodes, cpus) == shares


def test_a_node_without_cpus_of_its_own_uses_one_thread():
    assert decode_config(UpConfig(), 0, (), []).num_threads == 1
    assert decode_config(UpConfig(), 0, (0, 1), []).num_threads is None
    assert decode_config(UpConfig(num_threads=3), 0, (), []).num_threads == 3


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"port": 99999}, "--port"), ({"port": -1}, "--port"), ({"ready_file": Path("/no/such/place/x")}, "--ready-file")],
)
def test_bad_settings_are_found_before_anything_starts(settings: dict[str, object], flag: str):
    with pytest.raises(ConfigError, match=flag):
        UpConfig(**settings)


@pytest.mark.parametrize("name", ["heartbeat_interval", "peer_timeout", "lease_seconds", "max_barrier_stall"])
def test_times_must_be_finite_numbers(name: str):
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        TransferSettings(**{name: float("nan")})


def test_the_server_is_told_every_node():
    config = server_config(UpConfig(served_model_name=("x",)), prefill=["tcp://p:1"], decode=["tcp://d:1"])
    assert (config.prefill, config.decode, config.served_model_name) == (("tcp://p:1",), ("tcp://d:1",), ("x",))
