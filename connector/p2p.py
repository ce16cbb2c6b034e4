"""`P2PConnector`: prefill nodes push KV into blocks that decode nodes granted. See `peer_messages` for the protocol."""

from connector.factory import KVConnector
from connector.kv_sender import GrantTaker
from connector.link import Links
from connector.p2p_scheduler import P2PSchedulerConnector
from connector.p2p_worker import P2PPlace, P2PWorkerConnector


def make_p2p_connector(place: P2PPlace, links: Links, taker: GrantTaker) -> KVConnector:
    """Cheap: sockets and threads are made by `register_kv_caches`."""
    worker = P2PWorkerConnector(place, links, taker)
    return KVConnector(
        scheduler=P2PSchedulerConnector(place.settings, worker.has_ready_peer, worker.hold), worker=worker
    )
