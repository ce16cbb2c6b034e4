"""What /metrics shows. Names that vLLM has too carry its prefix, so that scrapers and dashboards work unchanged."""

from collections.abc import Sequence
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_MODEL_LABELS = ("model_name", "engine")


class Metrics:
    """One registry per server; label children are looked up once, not per token."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name, "engine": "0"}
        self.running = self._gauge("vllm:num_requests_running", "Sequences that have their first token.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Sequences accepted and without a token yet.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of sequences that got a token.")
        self.cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens received from decode nodes.")
        self.admission_rejections = self._counter(
            "vllm:admission_rejections",
            "Requests refused before any work: too much under way, or nobody to serve them.",
        )
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Time between two outputs.", ITL_BUCKETS)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS)
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt length.", LENGTH_BUCKETS)
        self.output_length = self._histogram("vllm:request_generation_tokens", "Output length.", LENGTH_BUCKETS)
        self._finished = Counter(
            "vllm:request_success",
            "Sequences by how they ended.",
            (*_MODEL_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._add_own()

    def finished(self, reason: str) -> Counter:
        return self._finished.labels(**self._model, finished_reason=reason)

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def _add_own(self) -> None:
        registry = self.registry
        node = ("role", "node")
        self.node_ready = Gauge("pdserve_node_ready", "1 if the node takes requests.", node, registry=registry)
        self.node_requests = Gauge(
            "pdserve_node_requests", "Sequences of this server at the node.", node, registry=registry
        )
        self.node_kv_usage = Gauge("pdserve_node_kv_usage", "Share of KV blocks in use there.", node, registry=registry)
        self.node_losses = Counter("pdserve_node_losses", "Times a node was lost.", node, registry=registry)
        self.late_outputs = Counter(
            "pdserve_late_outputs", "Outputs for sequences that are already over.", registry=registry
        )
        self.kv_releases = Counter(
            "pdserve_kv_releases", "Held KV given back because no node will fetch it.", registry=registry
        )
        self.unauthorized = Counter("pdserve_unauthorized_requests", "Requests without a valid key.", registry=registry)
        self.malformed = Counter("pdserve_malformed_messages", "Messages that could not be read.", registry=registry)
        self.disconnects = Counter("pdserve_client_disconnects", "Requests whose client left.", registry=registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _MODEL_LABELS, registry=self.registry).labels(**self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _MODEL_LABELS, registry=self.registry).labels(**self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, _MODEL_LABELS, registry=self.registry, buckets=buckets).labels(**self._model)


class _Stage(Enum):
    WAITING = 0
    RUNNING = 1
    OVER = 2


class SequenceBooks:
    """The measurements of one sequence. Times are those of arrival, so a slow client does not distort them."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, now: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._start = self._last = now
        self._stage = _Stage.WAITING
        metrics.waiting.inc()

    def tokens(self, num_tokens: int, now: float) -> None:
        """Outputs arrived."""
        if self._stage is _Stage.OVER:
            return
        if self._stage is _Stage.WAITING:
            self._first_token(now)
        else:
            self._metrics.itl.observe(now - self._last)
        self._last = now
        self._num_output_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def finish(self, reason: str, now: float, num_cached_tokens: int = 0) -> None:
        """The sequence is over. Only the first call counts."""
        if self._stage is _Stage.OVER:
            return
        metrics = self._metrics
        (metrics.waiting if self._stage is _Stage.WAITING else metrics.running).dec()
        self._stage = _Stage.OVER
        metrics.finished(reason).inc()
        metrics.cached_tokens.inc(num_cached_tokens)
        metrics.e2e.observe(now - self._start)
        metrics.prompt_length.observe(self._num_prompt_tokens)
        metrics.output_length.observe(self._num_output_tokens)

    def _first_token(self, now: float) -> None:
        self._stage = _Stage.RUNNING
        self._metrics.waiting.dec()
        self._metrics.running.inc()
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        self._metrics.ttft.observe(now - self._start)
