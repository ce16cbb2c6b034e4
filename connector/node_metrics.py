"""A node's metrics, read from the counters of its parts when somebody asks. Nothing is counted twice.

The `vllm:` names are those that routers and dashboards of this field look for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connector.p2p_scheduler import LocalPrefills, P2PSchedulerConnector
from connector.p2p_worker import P2PWorkerConnector
from engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What the metrics are read from. `worker` is None with a connector that is not ours."""

    engine: Engine
    worker: P2PWorkerConnector | None


Table = Mapping[str, tuple[str, str]]
"""Field of a counters object -> (metric, meaning)."""

ENGINE_COUNTERS: Table = {
    "num_steps": ("pdserve_engine_steps", "Engine steps"),
    "num_preemptions": ("vllm:num_preemptions", "Requests preempted"),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up here"),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found here"),
    "generated_tokens": ("vllm:generation_tokens", "Output tokens"),
    "prompt_tokens_computed": ("pdserve_prompt_tokens_computed", "Prompt tokens computed on this node"),
    "prompt_tokens_loaded": ("pdserve_prompt_tokens_loaded", "Prompt tokens whose KV came from a peer"),
    "num_early_admissions": ("pdserve_early_admissions", "Requests that ran before all their KV was in"),
    "num_loads_recomputed": ("pdserve_kv_loads_recomputed", "Failed loads whose requests were computed here"),
    "recomputed_tokens": ("pdserve_recomputed_tokens", "Tokens that failed loads did not bring"),
    "num_late_connector_ids": ("pdserve_late_reports", "Reports about transfers that were over"),
}
SENDER_COUNTERS: Table = {
    "num_bytes": ("pdserve_kv_bytes_sent", "KV bytes shipped"),
    "num_units": ("pdserve_kv_units_sent", "KV units shipped"),
    "num_transfers_sent": ("pdserve_kv_transfers_sent", "Transfers shipped whole"),
    "num_transfers_closed": ("pdserve_kv_transfers_closed", "Transfers ended before they were whole"),
    "seconds_waiting_for_credit": ("pdserve_kv_credit_wait_seconds", "Time senders waited for credit"),
}
LEASE_COUNTERS: Table = {
    "num_granted": ("pdserve_kv_leases_granted", "Leases given on finished requests' KV"),
    "num_renewed": ("pdserve_kv_leases_renewed", "Heartbeats that put a lease off"),
    "num_expired": ("pdserve_kv_leases_expired", "Leases that ended unread, by time"),
    "num_read": ("pdserve_kv_leases_read", "Leases that were read whole"),
    "num_released": ("pdserve_kv_leases_released", "Leases given back unread"),
    "num_refused_reads": ("pdserve_kv_reads_refused", "Reads of unknown or expired leases, or of another prompt"),
    "num_fenced_reads": ("pdserve_kv_reads_fenced", "Reads that ended after their lease"),
}
RECEIVER_COUNTERS: Table = {
    "num_bytes": ("pdserve_kv_bytes_received", "KV bytes received"),
    "num_units": ("pdserve_kv_units_received", "KV units received"),
    "num_hidden_bytes": ("pdserve_kv_bytes_hidden", "KV bytes received before the prefill was over; on one host"),
    "num_late_units": ("pdserve_kv_late_units", "Units and words about unknown or ended transfers"),
    "num_digest_mismatches": ("pdserve_kv_digest_mismatches", "Units whose digest was wrong"),
    "num_transfers_received": ("pdserve_kv_transfers_received", "Loads completed"),
    "num_transfers_failed": ("pdserve_kv_transfers_failed", "Loads failed"),
    "num_without_node": ("pdserve_kv_loads_without_node", "Loads that no prefill node was there for"),
    "num_next_candidates": ("pdserve_kv_next_candidates", "Loads granted again, to another prefill node"),
    "num_barrier_waits": ("pdserve_kv_barrier_waits", "Layers at whose barrier a step waited"),
    "barrier_seconds": ("pdserve_kv_barrier_seconds", "Time that steps waited at barriers"),
}
LOCAL_COUNTERS: Table = {
    "num_short": ("pdserve_local_prefills_short", "Prompts computed here because little was missing"),
    "num_without_node": ("pdserve_local_prefills_without_node", "Prompts computed here for want of a prefill node"),
}


class NodeCollector(Collector):
    """Yields nothing of the engine until `parts` gives one."""

    def __init__(self, role: str, model_name: str, parts: Callable[[], NodeParts | None]) -> None:
        self._labels = {"role": role, "model_name": model_name}
        self._parts = parts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        parts = self._parts()
        if parts is None:
            return
        yield from self._engine_metrics(parts.engine)
        if parts.worker is not None:
            yield from self._sender_metrics(parts.worker)
            yield from self._receiver_metrics(parts.worker)
        connector = parts.engine.scheduler.connector
        if isinstance(connector, P2PSchedulerConnector):
            yield from self._local_metrics(connector.local_prefills)

    def _engine_metrics(self, engine: Engine) -> Iterator[Metric]:
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        used = 1 - pool.num_free / pool.num_blocks
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch", scheduler.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled", scheduler.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used)
        yield self._gauge("pdserve_num_requests_loading", "Requests whose KV is on its way", scheduler.num_loading)
        yield self._gauge("pdserve_kv_blocks", "KV blocks", pool.num_blocks)
        yield self._gauge("pdserve_kv_blocks_free", "KV blocks free, cached ones included", pool.num_free)
        yield self._gauge("pdserve_kv_blocks_pinned", "KV blocks that transfers or leases pin", pool.num_pinned)
        yield from self._counters(scheduler.counters, ENGINE_COUNTERS)

    def _sender_metrics(self, worker: P2PWorkerConnector) -> Iterator[Metric]:
        yield self._gauge("pdserve_kv_decode_peers", "Decode nodes connected", len(worker.sender.peer_names))
        yield self._gauge("pdserve_kv_leases", "Leases on held KV", len(worker.leases))
        yield from self._counters(worker.sender.counters, SENDER_COUNTERS)
        yield from self._counters(worker.leases.counters, LEASE_COUNTERS)

    def _receiver_metrics(self, worker: P2PWorkerConnector) -> Iterator[Metric]:
        receiver = worker.receiver
        if receiver is None:
            return
        ready, longest = len(receiver.ready_peers()), receiver.counters.longest_barrier_seconds
        yield self._gauge("pdserve_kv_prefill_peers_ready", "Prefill nodes that shook hands", ready)
        yield self._gauge("pdserve_kv_quarantined", "Loads that a silent writer may reach", receiver.num_quarantined)
        yield self._gauge("pdserve_kv_longest_barrier_seconds", "Longest wait at one layer's barrier", longest)
        yield from self._counters(receiver.counters, RECEIVER_COUNTERS)

    def _local_metrics(self, local: LocalPrefills) -> Iterator[Metric]:
        yield from self._counters(local, LOCAL_COUNTERS)

    def _counters(self, source: object, table: Table) -> Iterator[Metric]:
        for field, (name, text) in table.items():
            yield self._counter(name, text, getattr(source, field))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
