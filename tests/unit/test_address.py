import pytest

from connector.address import check_tcp_address
from connector.zmq_link import ZmqLinks
from engine.errors import ConfigError, LinkError
from tests.unit.test_zmq_link import Recorder


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://node-1.example:65535", "tcp://[::1]:7100"])
def test_good_addresses(address: str):
    check_tcp_address("--listen", address)


@pytest.mark.parametrize(
    "address",
    ["nonsense", "127.0.0.1:7100", "tcp://:7100", "tcp://host", "tcp://host:99999", "tcp://::1:7100", "ipc:///x", ""],
)
def test_bad_addresses_are_refused_with_the_flag(address: str):
    with pytest.raises(ConfigError, match="--listen must look like tcp://HOST:PORT"):
        check_tcp_address("--listen", address)


def test_a_failed_dial_leaves_nothing_open():
    links = ZmqLinks("test")
    with pytest.raises(LinkError, match="cannot dial"):
        links.dial("tcp://nonsense", Recorder())
    links.close()
