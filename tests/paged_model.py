"""Runs the decoder by hand over a paged cache: chosen chunks, shuffled block tables, NaN in every slot not written."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import ScheduledRequest
from engine.decoder import Decoder
from engine.forward_inputs import build_forward_inputs
from engine.kv_cache import KVCache, KVLayout
from engine.kv_connector import LayerHooks
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class PagedSequence:
    """A sequence with its block table and how far it is computed."""

    name: str
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0

    def share(self, num_tokens: int, sampling: SamplingParams | None = GREEDY) -> ScheduledRequest:
        """The next `num_tokens` as one request of a batch."""
        return ScheduledRequest(
            request_id=self.name,
            token_ids=self.token_ids[self.num_computed : self.num_computed + num_tokens],
            num_computed_tokens=self.num_computed,
            block_ids=self.block_ids,
            sampling=sampling,
        )


class PagedModel:
    def __init__(self, decoder: Decoder, *, num_blocks: int = 200, block_size: int = 4) -> None:
        self.decoder = decoder
        layout = KVLayout.of_model(decoder.config, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype)
        self.kv_cache = KVCache.allocate(layout)
        for layer in self.kv_cache.layers:
            layer.fill_(torch.nan)
        self._free = list(range(num_blocks))
        random.Random(7).shuffle(self._free)

    def sequence(self, token_ids: Sequence[int], *, shared: Sequence[int] = (), room: int = 0) -> PagedSequence:
        """Blocks for the tokens and `room` more; `shared` are the leading blocks of another sequence (prefix hit)."""
        block_size = self.kv_cache.layout.block_size
        count = -(-(len(token_ids) + room) // block_size) - len(shared)
        own = [self._free.pop() for _ in range(count)]
        return PagedSequence(
            name=f"request-{len(self._free)}",
            token_ids=list(token_ids),
            block_ids=[*shared, *own],
            num_computed=len(shared) * block_size,
        )

    def step(self, shares: Sequence[tuple[PagedSequence, int]], hooks: LayerHooks | None = None) -> dict[str, Tensor]:
        """Computes the next tokens of each sequence in one forward; logits of every token, `[num_tokens, vocab]`."""
        requests = [sequence.share(num_tokens) for sequence, num_tokens in shares]
        inputs = build_forward_inputs(requests, self.kv_cache.layout, self.decoder.config.windows)
        rows = torch.arange(len(inputs.token_ids))
        every_row = replace(inputs, sample_rows=rows, output_rows=rows)
        logits = self.decoder.forward(every_row, self.kv_cache, hooks)
        for sequence, num_tokens in shares:
            sequence.num_computed += num_tokens
        counts = [len(request.token_ids) for request in inputs.sampled_requests]
        parts = torch.split(logits, counts)
        return {request.request_id: part for request, part in zip(inputs.sampled_requests, parts, strict=True)}

    def run(self, sequence: PagedSequence, chunks: Sequence[int]) -> Tensor:
        """The sequence alone, chunk by chunk; logits of all its tokens."""
        return torch.cat([self.step([(sequence, chunk)])[sequence.name] for chunk in chunks])

    def generate(self, sequence: PagedSequence, num_tokens: int, *, chunk: int) -> list[int]:
        """Greedy continuation, the prompt computed `chunk` tokens at a time."""
        num_prompt = len(sequence.token_ids)
        while len(sequence.token_ids) < num_prompt + num_tokens:
            left = len(sequence.token_ids) - sequence.num_computed
            logits = self.step([(sequence, min(chunk, left))])[sequence.name]
            if left <= chunk:
                sequence.token_ids.append(int(logits[-1].argmax()))
        return sequence.token_ids[num_prompt:]
