"""Logits to tokens. Stateless: a draw depends on (seed, output position) and the row's own logits, on nothing else.

Order, as in vLLM's V1 sampler, so that the same settings mean the same thing:

    logprobs            from the raw logits
    allowed tokens, grammar, logit_bias, banned tokens, repetition, frequency, presence penalty
    temperature         0: the largest logit wins, and this is the end
    min_p, top_k, top_p each keeps a leading part of the tokens sorted by logit, so together they are one cutoff per row
    draw                an exponential race: token i finishes at E_i / p_i, the first one wins

The race (Gumbel's trick) is chosen over inverting the cumulated probabilities because its noise belongs to the token.
Two nodes whose logits differ in the last bits, as they do when a batch is split differently, draw the same token unless
two finishers are within those bits; cumulated probabilities add up such differences over the vocabulary. It needs no
sort, and no sum whose order could depend on the batch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import ScheduledRequest
from engine.errors import ErrorKind, ServingError
from engine.request import SampledToken
from engine.sampler_noise import exponential_noise, row_keys, token_codes
from engine.sampling_params import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Below it float32 cannot hold logits / temperature; vLLM draws the line here too."""

_NUM_CANDIDATES = 1024
"""Sorted tokens looked at first for top_k and top_p; a row that keeps more is sorted whole."""

_RACE_ELEMENTS = 1 << 18
"""Noise made at once. Small enough for the cache: the noise is some twenty passes over the same memory."""


class BadLogits(ServingError):
    """Rows without a largest finite logit: the forward produced NaN or infinity, or every token is banned.

    `request_ids` names them. Nothing was sampled for the others, but as nothing is remembered the caller may call
    again with those rows left out, and gets the tokens they would have had.
    """

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        super().__init__(f"no finite logits to sample from: {', '.join(request_ids)}", kind=ErrorKind.INTERNAL)
        self.request_ids = request_ids


class Sampler:
    """Samples one token for each row. Settings are taken from the requests; token ids in them must be below vocab_size
    (`check_vocab` refuses others before a request is accepted)."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._codes = torch.empty(0, dtype=torch.int32)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[SampledToken]:
        """logits: [len(requests), vocab_size], any float type, left as they are. Raises `BadLogits`."""
        expected = (len(requests), self.vocab_size)
        assert logits.shape == expected, f"logits of shape {tuple(logits.shape)}, expected {expected}"
        if not requests:
            return []
        token_ids = self._choose(logits, requests)
        wanted = [row for row, request in enumerate(requests) if _sampling(request).logprobs is not None]
        if not wanted:
            return [SampledToken(token_id) for token_id in token_ids.tolist()]
        return _with_logprobs(logits, requests, token_ids, wanted)

    def _choose(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """int64 [rows]. The plain greedy rows need this one argmax; the others are worked on as a group."""
        best, token_ids = logits.max(dim=-1)
        worked = [row for row, request in enumerate(requests) if not _is_plain(request)]
        if worked:
            rows = torch.tensor(worked, device=logits.device)
            own_best, own_ids = self._choose_worked(logits[rows].float(), [requests[row] for row in worked])
            # Judged by what is left to choose from: an infinity that is banned does no harm.
            best = best.float().index_copy_(0, rows, own_best)
            token_ids.index_copy_(0, rows, own_ids)
        bad = (~torch.isfinite(best)).nonzero().flatten().tolist()
        if bad:
            raise BadLogits(tuple(requests[row].request_id for row in bad))
        return token_ids

    def _choose_worked(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor]:
        """logits: float32 copy, changed in place. The largest logit of each row and the chosen token."""
        _adjust(logits, requests)
        best, token_ids = logits.max(dim=-1)
        drawn = [row for row, request in enumerate(requests) if not _is_greedy(_sampling(request))]
        cut = [row for row in drawn if _needs_order(_sampling(requests[row]))]
        free = [row for row in drawn if not _needs_order(_sampling(requests[row]))]
        for group, draw in ((cut, self._draw_from_leading), (free, self._draw_from_all)):
            if group:
                rows = torch.tensor(group, device=logits.device)
                settings = [requests[row] for row in group]
                scores = _scaled(_take(logits, rows), best[rows], settings)
                token_ids[rows] = draw(scores, settings)
        return best, token_ids

    def _draw_from_all(self, scores: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """scores: float32 [rows, vocab], the largest of each row 0. For rows with at most a min_p."""
        scores.masked_fill_(scores < _min_p_cutoff(scores, requests), -math.inf)
        return self._race(scores, None, requests)

    def _draw_from_leading(self, scores: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """scores: float32 [rows, vocab], the largest of each row 0. For rows with top_k or top_p."""
        token_ids = torch.empty(len(requests), dtype=torch.int64, device=scores.device)
        left = torch.arange(len(requests), device=scores.device)
        for num_candidates in (min(_NUM_CANDIDATES, self.vocab_size), self.vocab_size):
            group = [requests[row] for row in left.tolist()]
            own_scores = _take(scores, left)
            ordered, ids = own_scores.topk(num_candidates, dim=-1)
            cutoff = _cutoff(ordered, own_scores, group)
            # Equal logits stay or go together, so the last candidate must lie below the cutoff to be sure of all.
            last = ordered[:, -1]
            settled = (last < cutoff.squeeze(-1)) | last.isneginf() | (num_candidates == self.vocab_size)
            ordered.masked_fill_(ordered < cutoff, -math.inf)
            chosen = [request for request, is_settled in zip(group, settled.tolist(), strict=True) if is_settled]
            token_ids[left[settled]] = self._race(ordered[settled], ids[settled], chosen)
            left = left[~settled]
            if len(left) == 0:
                break
        return token_ids

    def _race(self, scores: Tensor, ids: Tensor | None, requests: Sequence[ScheduledRequest]) -> Tensor:
        """The winning token id of each row. scores: float32 log weights [rows, n] of the tokens `ids` (None: 0 .. n-1).

        argmin E / p is argmax (log p - log E).
        """
        if not requests:
            return torch.empty(0, dtype=torch.int64, device=scores.device)
        codes = self._codes_on(scores.device)
        keys = row_keys([(_sampling(r).seed, r.output_position) for r in requests], scores.device)
        step = max(1, _RACE_ELEMENTS // scores.shape[1])
        winners = []
        for start in range(0, len(requests), step):
            rows = slice(start, start + step)
            noise = exponential_noise(keys[:, rows], codes if ids is None else codes[ids[rows]])
            winners.append((scores[rows] - noise.log_()).argmax(dim=-1, keepdim=True))
        places = torch.cat(winners)
        return (places if ids is None else ids.gather(1, places)).squeeze(1)

    def _codes_on(self, device: torch.device) -> Tensor:
        if len(self._codes) != self.vocab_size or self._codes.device != device:
            self._codes = token_codes(self.vocab_size, device)
        return self._codes


def _sampling(request: ScheduledRequest) -> SamplingParams:
    assert request.sampling is not None, f"request {request.request_id} is not to be sampled"
    return request.sampling


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < GREEDY_TEMPERATURE


def _is_plain(request: ScheduledRequest) -> bool:
    """Whether the largest raw logit is the answer."""
    sampling = _sampling(request)
    is_confined = bool(sampling.allowed_token_ids or request.token_mask) or len(request.banned_token_ids) > 0
    adjusted = is_confined or bool(sampling.logit_bias) or sampling.needs_history
    return _is_greedy(sampling) and not adjusted


def _needs_order(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """The rows named, which are in order; all of them without a copy."""
    return values if len(rows) == len(values) else values[rows]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


# ---- before the temperature: allowed tokens, grammar, bias, bans, penalties


def _adjust(logits: Tensor, requests: Sequence[ScheduledRequest]) -> None:
    """logits: float32 [rows, vocab], changed in place."""
    for row, request in enumerate(requests):
        if _sampling(request).allowed_token_ids:
            _confine(logits[row], _sampling(request).allowed_token_ids)
    masked = [row for row, request in enumerate(requests) if request.token_mask]
    if masked:
        _mask(logits, masked, [requests[row].token_mask for row in masked])
    biases = [(row, i, bias) for row, r in enumerate(requests) for i, bias in _sampling(r).logit_bias.items()]
    if biases:
        rows, ids, values = zip(*biases, strict=True)
        logits[list(rows), list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    bans = [(row, i) for row, request in enumerate(requests) for i in request.banned_token_ids]
    if bans:
        rows, ids = zip(*bans, strict=True)
        logits[list(rows), list(ids)] = -math.inf
    penalised = [row for row, request in enumerate(requests) if _sampling(request).needs_history]
    if penalised:
        _penalise(logits, requests, penalised)


def _confine(logits: Tensor, token_ids: Sequence[int]) -> None:
    """logits: `[vocab]`, changed in place: minus infinity for all other tokens."""
    index = torch.tensor(token_ids, device=logits.device)
    kept = logits[index]
    logits.fill_(-math.inf)
    logits[index] = kept


def _mask(logits: Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> None:
    """logits: changed in place: minus infinity in `rows` for each token whose bit is not set."""
    packed = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
    forbidden = np.unpackbits(~packed, axis=1, bitorder="little", count=logits.shape[1]).view(np.bool_)
    for row, is_forbidden in zip(rows, torch.from_numpy(forbidden).to(logits.device), strict=True):
        logits[row].masked_fill_(is_forbidden, -math.inf)


def _penalise(logits: Tensor, requests: Sequence[ScheduledRequest], penalised: Sequence[int]) -> None:
    """Repetition over prompt and output, then frequency and presence over output. logits: changed in place."""
    flat = logits.view(-1)
    vocab_size = logits.shape[1]
    outputs = [_flat_places(row, vocab_size, requests[row].output_token_ids) for row in penalised]
    prompts = [_flat_places(row, vocab_size, requests[row].prompt_token_ids) for row in penalised]
    seen = np.unique(np.concatenate([*outputs, *prompts]))
    made, counts = np.unique(np.concatenate(outputs), return_counts=True)

    def setting(name: str, places: np.ndarray) -> Tensor:
        by_row = np.array([getattr(_sampling(request), name) for request in requests], dtype=np.float32)
        return torch.from_numpy(by_row[places // vocab_size]).to(logits.device)

    index = torch.from_numpy(seen).to(logits.device)
    values, repetition = flat[index], setting("repetition_penalty", seen)
    flat[index] = torch.where(values > 0, values / repetition, values * repetition)
    index = torch.from_numpy(made).to(logits.device)
    times = torch.from_numpy(counts.astype(np.float32)).to(logits.device)
    flat[index] -= setting("frequency_penalty", made) * times + setting("presence_penalty", made)


def _flat_places(row: int, vocab_size: int, token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int64) + row * vocab_size


# ---- after it: one cutoff per row


def _scaled(logits: Tensor, best: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
    """Logits over temperature, shifted so that the largest is 0 and float32 is finest where it matters."""
    temperatures = _column([_sampling(request).temperature for request in requests], logits)
    return logits.sub_(best.unsqueeze(-1)).div_(temperatures)


def _min_p_cutoff(scores: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
    """[rows, 1]: log(min_p), as the likeliest token's score is 0; -inf where min_p is off."""
    min_ps = [_sampling(request).min_p for request in requests]
    return _column([math.log(min_p) if min_p > 0 else -math.inf for min_p in min_ps], scores)


def _cutoff(ordered: Tensor, scores: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
    """[rows, 1]: the smallest score kept, or one that is not above `ordered`'s last where that cannot be told from it.

    ordered: the row's largest scores, falling; scores: all of the row.
    """
    num_ordered = ordered.shape[1]
    top_ks = [_sampling(request).top_k for request in requests]
    last = [min(top_k, num_ordered) - 1 if top_k else num_ordered - 1 for top_k in top_ks]
    kth = ordered.gather(1, torch.tensor(last, device=ordered.device).unsqueeze(-1))
    limited = torch.tensor([0 < top_k < num_ordered for top_k in top_ks], device=ordered.device).unsqueeze(-1)
    cutoff = torch.maximum(kth.masked_fill(~limited, -math.inf), _min_p_cutoff(ordered, requests))
    if all(_sampling(request).top_p == 1.0 for request in requests):
        return cutoff
    return torch.maximum(cutoff, _nucleus_cutoff(ordered, scores, cutoff, requests))


def _nucleus_cutoff(ordered: Tensor, scores: Tensor, cutoff: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
    """[rows, 1]: score of the last token needed to reach top_p of what `cutoff` leaves; summed in float64."""
    top_ps = _column([_sampling(request).top_p for request in requests], ordered).double()
    weights = ordered.exp().masked_fill_(ordered < cutoff, 0.0).double()
    total = scores.exp().masked_fill_(scores < cutoff, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = weights.cumsum(dim=-1) - weights
    kept = (before < top_ps * total).sum(dim=-1, keepdim=True).clamp_(min=1)
    # A row without top_p must not lose a token to rounding because its neighbour in the batch has one.
    return ordered.gather(1, kept - 1).masked_fill_(top_ps == 1.0, -math.inf)


# ---- beside it: logprobs


def _with_logprobs(
    logits: Tensor, requests: Sequence[ScheduledRequest], token_ids: Tensor, wanted: Sequence[int]
) -> list[SampledToken]:
    rows = torch.tensor(wanted, device=logits.device)
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    own = logprobs.gather(1, token_ids[rows].unsqueeze(-1)).squeeze(-1).tolist()
    counts = [_sampling(requests[row]).logprobs or 0 for row in wanted]
    top_values, top_ids = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tokens = [SampledToken(token_id) for token_id in token_ids.tolist()]
    for row, logprob, count, values, ids in zip(
        wanted, own, counts, top_values.tolist(), top_ids.tolist(), strict=True
    ):
        top = tuple(zip(ids[:count], values[:count], strict=True))
        tokens[row] = SampledToken(tokens[row].token_id, logprob, top)
    return tokens
