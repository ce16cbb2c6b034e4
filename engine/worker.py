"""The worker: everything that touches tensors in one step. It learns all from the `Batch`, and remembers only weights
and KV.

    bind metadata -> start_load_kv -> forward, two hooks per layer -> wait_for_save -> sample -> get_finished -> clear
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.batch import Batch, BatchResult, ScheduledRequest
from engine.decoder import Decoder
from engine.forward_inputs import build_forward_inputs
from engine.kv_cache import KVCache
from engine.kv_connector import WorkerConnector
from engine.prompt_logprobs import PromptLogprobs
from engine.prompt_scorer import score_prompt
from engine.request import SampledToken
from engine.sampler import BadLogits, Sampler

Sampling = tuple[dict[str, SampledToken], dict[str, str]]
"""Tokens, and why there is none, by request id."""


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
            return self._compute(batch, None)
        return self._execute_connected(batch, self._connector)

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()

    def _execute_connected(self, batch: Batch, connector: WorkerConnector) -> BatchResult:
        connector.bind_connector_metadata(batch.connector_metadata)
        try:
            connector.start_load_kv()
            result = self._compute(batch, connector)
            connector.wait_for_save()
            # The batch names no finished requests: a connector that needs them has them in its own metadata.
            return replace(result, connector_output=connector.get_finished(frozenset()))
        finally:
            connector.clear_connector_metadata()

    @torch.inference_mode()
    def _compute(self, batch: Batch, hooks: WorkerConnector | None) -> BatchResult:
        if not batch.requests:
            return BatchResult()
        config = self._decoder.config
        inputs = build_forward_inputs(batch.requests, self._kv_cache.layout, config.windows)
        hidden = self._decoder.hidden(inputs, self._kv_cache, hooks)
        num_sampled = len(inputs.sampled_requests)
        sampled, unsampled = self._sample(self._decoder.head(hidden[:num_sampled]), inputs.sampled_requests)
        prompt_logprobs = self._score(hidden[num_sampled:], inputs.scored_requests) if inputs.scored_requests else {}
        return BatchResult(sampled=sampled, unsampled=unsampled, prompt_logprobs=prompt_logprobs)

    def _score(self, hidden: torch.Tensor, requests: Sequence[ScheduledRequest]) -> dict[str, list[PromptLogprobs]]:
        """hidden: the rows of all the requests, one after the other."""
        scored, start = {}, 0
        for request in requests:
            assert request.prompt_logprobs is not None
            rows = hidden[start : start + len(request.prompt_logprobs.next_token_ids)]
            start += len(rows)
            scored[request.request_id] = score_prompt(
                rows, request, self._decoder.head, self._decoder.config.vocab_size
            )
        return scored

    def _sample(self, logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> Sampling:
        """One request's bad numbers must not cost the others their step: its row is left out and named."""
        try:
            tokens = self._sampler(logits, requests)
        except BadLogits as error:
            good = [row for row, request in enumerate(requests) if request.request_id not in error.request_ids]
            sampled, _ = self._sample(logits[good], [requests[row] for row in good])
            return sampled, dict.fromkeys(error.request_ids, "the model's output is not finite")
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}, {}
