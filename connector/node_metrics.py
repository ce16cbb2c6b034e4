"""A node's metrics, read from the counters of its parts when somebody asks. Nothing is counted twice.

The `vllm:` names are those that routers and dashboards of this field look for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connector.p2p_worker import P2PWorkerConnector
from engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What the metrics are read from. `worker` is None with a connector that is not ours."""

    engine: Engine
    worker: P2PWorkerConnector | None


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

    def _engine_metrics(self, engine: Engine) -> Iterator[Metric]:
        scheduler, pool, counters = engine.scheduler, engine.scheduler.pool, engine.scheduler.counters
        used = 1 - pool.num_free / pool.num_blocks
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch", scheduler.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled", scheduler.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used)
        yield self._gauge("pdserve_num_requests_loading", "Requests whose KV is on its way", scheduler.num_loading)
        yield self._gauge("pdserve_kv_blocks", "KV blocks", pool.num_blocks)
        yield self._gauge("pdserve_kv_blocks_free", "KV blocks free, cached ones included", pool.num_free)
        yield self._counter("vllm:num_preemptions", "Requests preempted", counters.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up here", counters.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found here", counters.prefix_hits)
        yield self._counter("vllm:generation_tokens", "Output tokens", counters.generated_tokens)
        yield self._counter(
            "pdserve_prompt_tokens_computed", "Prompt tokens computed on this node", counters.prompt_tokens_computed
        )
        yield self._counter(
            "pdserve_prompt_tokens_loaded", "Prompt tokens whose KV came from a peer", counters.prompt_tokens_loaded
        )
        yield self._counter("pdserve_engine_steps", "Engine steps", counters.num_steps)

    def _sender_metrics(self, worker: P2PWorkerConnector) -> Iterator[Metric]:
        counters = worker.sender.counters
        yield self._counter("pdserve_kv_bytes_sent", "KV bytes shipped to decode nodes", counters.num_bytes)
        yield self._counter("pdserve_kv_units_sent", "KV units shipped to decode nodes", counters.num_units)
        yield self._counter("pdserve_kv_transfers_sent", "Transfers shipped whole", counters.num_transfers_sent)
        yield self._counter(
            "pdserve_kv_transfers_closed", "Transfers ended before they were whole", counters.num_transfers_closed
        )
        yield self._counter(
            "pdserve_kv_credit_wait_seconds", "Time senders waited for credit", counters.seconds_waiting_for_credit
        )
        yield self._gauge("pdserve_kv_decode_peers", "Decode nodes connected", len(worker.sender.peer_names))

    def _receiver_metrics(self, worker: P2PWorkerConnector) -> Iterator[Metric]:
        if worker.receiver is None:
            return
        counters = worker.receiver.counters
        yield self._counter("pdserve_kv_bytes_received", "KV bytes received", counters.num_bytes)
        yield self._counter("pdserve_kv_units_received", "KV units received", counters.num_units)
        yield self._counter("pdserve_kv_late_units", "Units of unknown or ended transfers", counters.num_late_units)
        yield self._counter(
            "pdserve_kv_digest_mismatches", "Units whose digest was wrong", counters.num_digest_mismatches
        )
        yield self._counter("pdserve_kv_transfers_received", "Loads completed", counters.num_transfers_received)
        yield self._counter("pdserve_kv_transfers_failed", "Loads failed", counters.num_transfers_failed)
        ready = len(worker.receiver.ready_peers())
        yield self._gauge("pdserve_kv_prefill_peers_ready", "Prefill nodes that shook hands", ready)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
