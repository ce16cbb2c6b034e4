import os

import pytest

from connector.factory import KVConnector, create_connector, register_connector
from connector.identity import ModelIdentity, NodeIdentity
from connector.memory_link import MemoryLinks, MemoryNetwork
from connector.p2p_scheduler import P2PSchedulerConnector
from connector.p2p_worker import P2PPlace, P2PWorkerConnector
from engine.errors import ConfigError
from tests.unit.test_kv_transfer import IDENTITY, RecordingTaker


def make(name: str, identity: ModelIdentity = IDENTITY) -> KVConnector:
    place = P2PPlace(identity=NodeIdentity(name="n", epoch="e", model=identity, pid=os.getpid()))
    return create_connector(name, place, MemoryLinks(MemoryNetwork()), RecordingTaker())


def test_the_registered_name_makes_both_ends():
    connector = make("p2p")
    assert isinstance(connector.scheduler, P2PSchedulerConnector)
    assert isinstance(connector.worker, P2PWorkerConnector)


def test_an_outside_connector_is_taken_by_its_path():
    assert isinstance(make("connector.p2p:make_p2p_connector"), KVConnector)


def test_a_taken_name_is_an_error():
    with pytest.raises(ConfigError, match=r"'p2p' is registered already .* known: p2p"):
        register_connector("p2p", "somewhere:else")


@pytest.mark.parametrize(
    ("name", "says"),
    [("nixl", "known: p2p"), ("nowhere.at_all:thing", "nowhere"), ("connector.p2p:nothing", "nothing")],
)
def test_an_unknown_name_lists_the_known_ones(name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        make(name)
