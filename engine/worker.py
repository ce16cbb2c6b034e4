"""The worker: everything that touches tensors in one step. It learns all from the `Batch`, and remembers only weights
and KV.

    bind metadata -> start_load_kv -> forward, two hooks per layer -> wait_for_save -> sample -> get_finished -> clear
"""

import torch

from engine.batch import Batch, BatchResult
from engine.decoder import Decoder
from engine.forward_inputs import build_forward_inputs
from engine.kv_cache import KVCache
from engine.kv_connector import WorkerConnector
from engine.request import SampledToken
from engine.sampler import Sampler


class Worker:
    """Runs batches. All calls come from one thread."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, sampler: Sampler, connector: WorkerConnector | None = None
    ) -> None:
        """Registers the KV cache with `connector`, which opens its sockets then; `shutdown` closes them."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._connector = connector
        if connector is not None:
            connector.register_kv_caches(kv_cache.layers)

    def execute(self, batch: Batch) -> BatchResult:
        """Computes the batch's tokens; one without requests lets the connector report."""
        if self._connector is None:
            return BatchResult(sampled=self._compute(batch, None))
        return self._execute_connected(batch, self._connector)

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()

    def _execute_connected(self, batch: Batch, connector: WorkerConnector) -> BatchResult:
        connector.bind_connector_metadata(batch.connector_metadata)
        try:
            connector.start_load_kv()
            sampled = self._compute(batch, connector)
            connector.wait_for_save()
            # The batch names no finished requests: a connector that needs them has them in its own metadata.
            return BatchResult(sampled=sampled, connector_output=connector.get_finished(frozenset()))
        finally:
            connector.clear_connector_metadata()

    @torch.inference_mode()
    def _compute(self, batch: Batch, hooks: WorkerConnector | None) -> dict[str, SampledToken]:
        if not batch.requests:
            return {}
        config = self._decoder.config
        inputs = build_forward_inputs(batch.requests, self._kv_cache.layout, config.windows)
        logits = self._decoder.forward(inputs, self._kv_cache, hooks)
        if not inputs.sampled_requests:
            return {}
        tokens = self._sampler(logits, inputs.sampled_requests)
        return {request.request_id: token for request, token in zip(inputs.sampled_requests, tokens, strict=True)}
