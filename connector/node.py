"""A node process, from its settings to its exit code. Both roles run this; they differ by who they talk to.

  threads and CPUs -> plan -> admin endpoint -> bind addresses -> announce -> weights, KV, connector -> engine loop
                                                                                                       |
                                          exit 0 <- close everything <- tell servers <- SIGTERM, SIGINT, parent gone

The admin endpoint and the server link answer from the start: "not ready, loading the model".
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from connector import failpoints
from connector.address import check_tcp_address
from connector.admin import AdminEndpoint, AdminView
from connector.codec import PROTOCOL_VERSION
from connector.engine_loop import EngineLoop
from connector.factory import KVConnector, create_connector
from connector.held_params import to_pull
from connector.identity import ModelIdentity, NodeIdentity
from connector.kv_receiver import KVReceiver
from connector.kv_transfer_params import KVTransferParams
from connector.node_config import NodeConfig
from connector.node_debug import debug_state
from connector.node_metrics import NodeCollector, NodeParts
from connector.p2p_scheduler import HoldKV, PullKV, RemotePrefill, ShipKV
from connector.p2p_worker import P2PPlace, P2PWorkerConnector
from connector.parent_link import ParentLink
from connector.prefill_peer import PeerState
from connector.server_link import NodeStatus, RequestDoor, ServerLink
from connector.server_messages import Generate, NodeHello, NodeLoad, Role
from connector.shared_kv import SharedKVMemory, is_available
from connector.zmq_link import ZmqLinks
from engine.build import Connection, EnginePlan, build_engine, plan_engine, use_threads
from engine.engine import Engine
from engine.errors import ConfigError, ErrorKind, LinkError, RequestError
from engine.request import Request

logger = logging.getLogger(__name__)

LOADING = "loading the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddresses:
    """Where a node is reached, and whom it may dial for KV."""

    listen: str
    admin_port: int
    kv_listen: str | None = None
    prefill: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tcp_address("--listen", self.listen)
        if self.kv_listen is not None:
            check_tcp_address("--kv-listen", self.kv_listen)
        for address in self.prefill:
            check_tcp_address("--prefill", address)


class Node:
    """One node. `run` blocks until it is told to stop."""

    def __init__(self, role: Role, config: NodeConfig, addresses: NodeAddresses) -> None:
        self._config = config
        self._addresses = addresses
        self._loop = EngineLoop(time.monotonic)
        self._parts: NodeParts | None = None
        self._plan = plan_engine(config.engine)
        self._identity = _identity(role, config, addresses, self._plan)
        self._admin = self._open_admin(role)
        self._links = ZmqLinks("servers")
        self._kv_links = ZmqLinks("kv")
        self._server_link = self._open_server_link(role)
        self._memory: SharedKVMemory | None = None
        self._connector: KVConnector | None = None
        self.loaded = threading.Event()
        self.where: dict[str, str | None] = {}
        """Our name and the addresses with their real ports, once known."""

    @property
    def parts(self) -> NodeParts | None:
        """None while the model is loading."""
        return self._parts

    def run(self) -> None:
        connector = self._connector = self._connect()
        self._announce()
        engine = self._build(connector)
        self.loaded.set()
        self._loop.run(engine, self._server_link.deliver, self._refuse)
        self._end_requests(engine)

    def stop(self) -> None:
        """Drains and ends. Safe to call from a signal handler or any thread."""
        self._loop.stop(self._config.drain_timeout)

    def close(self) -> None:
        """Closes everything that is open, in whatever state."""
        self._server_link.say_goodbye("shutting down")
        if self._parts is not None:
            self._parts.engine.shutdown()
        self._kv_links.close()
        self._links.close()
        self._admin.close()
        if self._memory is not None:
            self._memory.close()

    def _open_admin(self, role: Role) -> AdminEndpoint:
        registry = CollectorRegistry()
        registry.register(NodeCollector(role, self._config.model.model, lambda: self._parts))
        view = AdminView(
            not_ready_reason=self._not_ready_reason,
            registry=registry,
            debug_state=(lambda: debug_state(self._parts)) if self._config.debug_state else None,
        )
        return AdminEndpoint(self._config.admin_host, self._addresses.admin_port, view)

    def _open_server_link(self, role: Role) -> ServerLink:
        hello = NodeHello(
            protocol_version=PROTOCOL_VERSION,
            role=role,
            name=self._identity.name,
            epoch=self._identity.epoch,
            model=self._identity.model,
            max_model_len=self._plan.max_model_len,
            num_blocks=self._plan.layout.num_blocks,
            max_num_seqs=self._config.engine.scheduler.max_num_seqs,
        )
        return ServerLink(
            hello,
            self._loop,
            RequestDoor(make_request=self._make_request, release=self._release, status=self._status),
            self._config.server_timeout,
        )

    def _connect(self) -> KVConnector:
        """Binds every address, before anything heavy: a port in use is known at once."""
        try:
            address = self._server_link.listen(self._links, self._addresses.listen)
        except LinkError as error:
            raise ConfigError(f"--listen: {error}") from error
        connector = self._make_connector()
        kv_address = None
        if isinstance(connector.worker, P2PWorkerConnector):
            try:
                connector.worker.listen()
            except LinkError as error:
                raise ConfigError(f"--kv-listen: {error}") from error
            kv_address = connector.worker.listen_address
        self.where = {
            "name": self._identity.name,
            "address": address,
            "kv_address": kv_address,
            "admin_url": self._admin.url,
        }
        return connector

    def _build(self, connector: KVConnector) -> Engine:
        buffer = self._memory.buffer if self._memory is not None else None
        connection = Connection(scheduler=connector.scheduler, worker=connector.worker, buffer=buffer)
        try:
            engine = build_engine(self._plan, self._config.engine, connection, time.monotonic, self._loop.wake)
        except LinkError as error:
            raise ConfigError(f"--prefill: {error}") from error
        worker = connector.worker if isinstance(connector.worker, P2PWorkerConnector) else None
        self._parts = NodeParts(engine=engine, worker=worker)
        return engine

    def _make_connector(self) -> KVConnector:
        transfer = self._config.transfer
        if self._addresses.prefill and transfer.transport != "zmq" and is_available():
            self._memory = SharedKVMemory(self._plan.layout.total_bytes)
        place = P2PPlace(
            identity=self._identity,
            settings=transfer,
            listen=self._addresses.kv_listen,
            prefill_addresses=self._addresses.prefill,
            shared_memory=self._memory,
        )
        return create_connector(self._config.kv_connector, place, self._kv_links, self._loop)

    def _announce(self) -> None:
        logger.info("listening: %s", ", ".join(f"{key} {value}" for key, value in self.where.items() if value))
        if self._config.parent_fd is not None:
            parent = ParentLink(self._config.parent_fd)
            parent.announce(self.where)
            parent.watch(self.stop)

    def _make_request(self, message: Generate, request_id: str) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            eos_token_ids=self._plan.model.eos_token_ids,
            cache_salt=message.cache_salt,
            priority=message.priority,
            trace=message.trace,
            kv_transfer=self._transfer_of(message),
        )

    def _transfer_of(self, message: Generate) -> RemotePrefill | PullKV | HoldKV | None:
        """Where the request's KV comes from, or that it is to stay. Raises `RequestError`."""
        params = message.kv_transfer_params
        if params is not None and params.do_remote_decode and self._addresses.kv_listen is None:
            reason = "this node holds no KV for others: it has no --kv-listen"
            raise RequestError(reason, param="kv_transfer_params.do_remote_decode")
        if params is not None and params.do_remote_prefill:
            source = to_pull(params)
            if (receiver := self._receiver) is not None:
                receiver.await_lease(source)
                return source
        if params is not None and params.do_remote_decode:
            return HoldKV()
        return RemotePrefill(tuple(message.prefill_nodes)) if self._addresses.prefill else None

    @property
    def _receiver(self) -> KVReceiver | None:
        worker = self._parts.worker if self._parts is not None else None
        return worker.receiver if worker is not None else None

    def _release(self, params: KVTransferParams) -> None:
        """The second leg will not come. We hold the KV, or know who does."""
        worker = self._parts.worker if self._parts is not None else None
        if worker is None:
            return
        try:
            source = to_pull(params)
        except RequestError as error:
            logger.warning("cannot release held KV: %s", error)
            return
        if source.peer == self._identity.name:
            worker.sender.release_lease(source.lease_id)
        elif worker.receiver is not None:
            worker.receiver.release(source)

    def _refuse(self, request: Request, kind: ErrorKind, reason: str, param: str | None) -> None:
        worker = self._parts.worker if self._parts is not None else None
        match request.kv_transfer:
            case ShipKV() if worker is not None:
                worker.sender.fail(request.request_id, kind, reason)
                return
            case PullKV() as source if worker is not None and worker.receiver is not None:
                worker.receiver.release(source)
        self._server_link.refuse(request, kind, reason, param)

    def _end_requests(self, engine: Engine) -> None:
        """Every accepted request gets its final message, also when we go down."""
        engine.abort_all()
        self._server_link.deliver(engine.step())

    def _not_ready_reason(self) -> str:
        if self._parts is None:
            return LOADING
        if self._loop.is_draining:
            return "shutting down"
        worker = self._parts.worker
        if worker is None or worker.receiver is None or worker.receiver.ready_peers():
            return ""
        peers = worker.receiver.peers
        # One that is away may come back; one that refuses us is a mistake that somebody has to see.
        if self._config.transfer.fallback == "local" and all(p.state is not PeerState.REFUSED for p in peers):
            return ""
        return "no prefill node: " + ", ".join(f"{peer.name} ({peer.reason})" for peer in peers)

    def _status(self) -> NodeStatus:
        parts = self._parts
        if parts is None:
            return NodeStatus(reason=LOADING, load=NodeLoad(), ready_peers=[])
        scheduler, pool = parts.engine.scheduler, parts.engine.scheduler.pool
        load = NodeLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_loading,
            kv_usage=1 - pool.num_free / pool.num_blocks,
        )
        receiver = parts.worker.receiver if parts.worker is not None else None
        ready_peers = receiver.ready_peers() if receiver is not None else []
        return NodeStatus(reason=self._not_ready_reason(), load=load, ready_peers=ready_peers)


def run_node(role: Role, config: NodeConfig, addresses: NodeAddresses) -> int:
    """The exit code. `ConfigError` passes through; any other exception is a bug and shows its traceback."""
    _start_logging(config)
    failpoints.arm_from_environment()
    threading.excepthook = _crash
    num_threads = use_threads(config.num_threads, config.cpus)
    node = Node(role, config, addresses)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    logger.info("%s, %d threads", config.model.model, num_threads)
    try:
        node.run()
    finally:
        node.close()
    return 0


def _identity(role: Role, config: NodeConfig, addresses: NodeAddresses, plan: EnginePlan) -> NodeIdentity:
    model = ModelIdentity(
        config_digest=plan.model.digest(),
        weights_digest=plan.weights_digest,
        dtype=plan.dtype_name,
        num_layers=plan.layout.num_layers,
        num_kv_heads=plan.layout.num_kv_heads,
        head_dim=plan.layout.head_dim,
        block_size=plan.layout.block_size,
    )
    name = config.name or f"{role}-{socket.gethostname()}-{addresses.listen.rpartition(':')[2]}-{os.getpid()}"
    return NodeIdentity(name=name, epoch=secrets.token_hex(8), model=model, pid=os.getpid())


def _start_logging(config: NodeConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _crash(failure: threading.ExceptHookArgs) -> None:
    """A thread that dies takes the process with it: half a node is worse than none."""
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    os._exit(1)
