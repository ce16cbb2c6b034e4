"""How likely a prompt's tokens were, by the raw logits. In slices: prompt times vocabulary would not fit in memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.batch import ScheduledRequest
from engine.prompt_logprobs import MAX_PIECE_POSITIONS, PromptLogprobs

MAX_SLICE_LOGITS = 1 << 24
"""64 MB in float32, and twice that while it is worked on."""


def score_prompt(
    hidden: Tensor, request: ScheduledRequest, head: Callable[[Tensor], Tensor], vocab_size: int
) -> list[PromptLogprobs]:
    """hidden: `[num_rows, hidden_size]`, what `head` reads of the positions before those that `request` wants."""
    assert request.prompt_logprobs is not None
    num_top, next_ids = request.prompt_logprobs
    targets = torch.tensor(next_ids, dtype=torch.int64, device=hidden.device)
    return [
        _score(head(hidden[rows]), targets[rows], request.num_computed_tokens + 1 + rows.start, num_top)
        for rows in _slices(len(targets), vocab_size)
    ]


def _slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, min(MAX_PIECE_POSITIONS, MAX_SLICE_LOGITS // vocab_size))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _score(logits: Tensor, targets: Tensor, start: int, num_top: int) -> PromptLogprobs:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, targets.unsqueeze(-1))
    top_values, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return PromptLogprobs(
        start=start,
        num_top=top_ids.shape[1],
        logprobs=_packed(own, "<f4"),
        ranks=_packed((logprobs > own).sum(dim=-1) + 1, "<i4"),
        top_token_ids=_packed(top_ids, "<i4"),
        top_logprobs=_packed(top_values, "<f4"),
    )


def _packed(values: Tensor, dtype: str) -> bytes:
    return bytes(values.cpu().numpy().astype(dtype).tobytes())
