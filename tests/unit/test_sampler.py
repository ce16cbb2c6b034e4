"""The sampler against a slow, plain reference, and the promises it makes about draws."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from engine.batch import ScheduledRequest
from engine.errors import RequestError, ServingError
from engine.request import SampledToken
from engine.sampler import BadLogits, Sampler
from engine.sampler_noise import exponential_noise, row_keys, token_codes
from engine.sampling_params import SamplingParams, check_vocab

VOCAB = 97


def make_request(request_id="r", *, position=0, banned=(), prompt=(), output=(), **settings):
    return ScheduledRequest(
        request_id=request_id,
        token_ids=[1],
        num_computed_tokens=0,
        block_ids=[0],
        sampling=SamplingParams(**settings),
        output_position=position,
        banned_token_ids=banned,
        prompt_token_ids=prompt,
        output_token_ids=output,
    )


def make_logits(rows=1, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits, request):
    return Sampler(logits.shape[-1])(logits.reshape(1, -1), [request])[0]


def kept_tokens(logits, draws=400, **settings):
    """Every token that many seeds lead to; with a flat row, all that the filters keep."""
    requests = [make_request(seed=seed, **settings) for seed in range(draws)]
    return {t.token_id for t in Sampler(logits.shape[-1])(logits.expand(draws, -1), requests)}


def reference_probs(logits, request):
    """Probabilities after every setting, token by token, in float64 Python."""
    sampling = request.sampling
    values = [float(value) for value in logits]
    if sampling.allowed_token_ids:
        values = [value if i in sampling.allowed_token_ids else -math.inf for i, value in enumerate(values)]
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    for token in request.banned_token_ids:
        values[token] = -math.inf
    output = Counter(request.output_token_ids)
    for token in {*request.prompt_token_ids, *output}:
        values[token] = (
            values[token] / sampling.repetition_penalty
            if values[token] > 0
            else values[token] * sampling.repetition_penalty
        )
    for token, count in output.items():
        values[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if sampling.temperature == 0:
        best = values.index(max(values))
        return [float(token == best) for token in range(len(values))]
    top = max(values)
    weights = [math.exp((value - top) / sampling.temperature) for value in values]
    weights = [w if w >= sampling.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if sampling.top_k:
        for token in order[sampling.top_k :]:
            weights[token] = 0.0
    total, before = sum(weights), 0.0
    for token in order:
        weight = weights[token]
        if before >= sampling.top_p * total:
            weights[token] = 0.0
        before += weight
    return [weight / sum(weights) for weight in weights]


HISTORY = {"prompt": (1, 2, 3, 3), "output": (3, 4, 4, 4)}
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {5: 100.0}},
    {"temperature": 0, "repetition_penalty": 1.9, **HISTORY},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 7},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 1.0, "logit_bias": {0: 4.0, 96: -100.0}, "banned": (7, 8)},
    {"temperature": 0, "allowed_token_ids": (3, 4, 90), "logit_bias": {5: 100.0}},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, 40, 3)), "banned": (3, 5), "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.7, **HISTORY},
    {"temperature": 1.0, "repetition_penalty": 0.6, "presence_penalty": 1.5, "frequency_penalty": -0.7, **HISTORY},
]


def chi_square(counts, probs):
    """Statistic over tokens expected at least 5 times, the rest pooled, and its degrees of freedom."""
    draws = sum(counts.values())
    cells = [(counts[token], prob * draws) for token, prob in enumerate(probs) if prob * draws >= 5]
    pooled = draws - sum(count for count, _ in cells), draws - sum(expected for _, expected in cells)
    if pooled[1] >= 5:
        cells.append(pooled)
    return sum((count - expected) ** 2 / expected for count, expected in cells), max(len(cells) - 1, 1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_reference_distribution(settings):
    draws = 6000
    logits = make_logits()[0]
    requests = [make_request(seed=seed % 60, position=seed // 60, **settings) for seed in range(draws)]
    counts = Counter(t.token_id for t in Sampler(VOCAB)(logits.expand(draws, -1), requests))
    probs = reference_probs(logits, requests[0])
    assert all(probs[token] > 0 for token in counts), "a filtered token was drawn"
    statistic, freedom = chi_square(counts, probs)
    # Five standard deviations of a chi-square variable; the seeds are fixed, so it either always or never passes.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.99])
def test_top_p_keeps_exactly_the_reference_nucleus(top_p):
    logits = torch.linspace(0, 2, VOCAB)
    probs = reference_probs(logits, make_request(top_p=top_p))
    assert kept_tokens(logits, draws=8000, top_p=top_p) == {token for token, prob in enumerate(probs) if prob > 0}


def test_rows_that_keep_more_than_the_candidates_are_sorted_whole():
    vocab = 3000
    logits = torch.linspace(0, 0.5, vocab)
    probs = reference_probs(logits, make_request(top_p=0.9))
    kept = kept_tokens(logits, draws=2000, top_p=0.9)
    assert kept <= {token for token, prob in enumerate(probs) if prob > 0}
    assert len(kept) > 1024
    assert len(kept_tokens(logits, draws=2000, top_k=2000)) > 1024


def test_candidate_path_and_whole_path_draw_the_same_token():
    logits = make_logits(64, vocab=3000)
    sampler = Sampler(3000)
    few = sampler(logits, [make_request(seed=seed, top_k=2999) for seed in range(64)])
    all_of_them = sampler(logits, [make_request(seed=seed) for seed in range(64)])
    assert few == all_of_them


def test_the_same_row_alone_and_in_a_batch_gives_the_same_token_and_logprob():
    logits = make_logits(33)
    requests = [
        make_request(str(row), seed=row, position=row * 3, logprobs=row % 4, **SETTINGS[row % len(SETTINGS)])
        for row in range(33)
    ]
    together = Sampler(VOCAB)(logits, requests)
    alone = [Sampler(VOCAB)(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
    assert together == alone
    backwards = Sampler(VOCAB)(logits.flip(0), requests[::-1])[::-1]
    assert together == backwards


def test_a_draw_depends_on_seed_and_position():
    logits = torch.zeros(VOCAB)
    draw = {
        (seed, position): sample(logits, make_request(seed=seed, position=position)).token_id
        for seed in range(20)
        for position in range(20)
    }
    again = sample(logits, make_request("other", seed=3, position=7)).token_id
    assert again == draw[3, 7]
    assert len({tuple(draw[seed, p] for p in range(20)) for seed in range(20)}) == 20
    assert len({tuple(draw[s, position] for s in range(20)) for position in range(20)}) == 20
    assert draw[0, 1] != draw[1, 0] or draw[0, 2] != draw[2, 0]


def test_draws_are_pinned():
    """A change of these numbers breaks a fleet in which nodes of two versions continue each other's requests."""
    logits = torch.linspace(0, 2, VOCAB)
    drawn = [sample(logits, make_request(seed=2**63 - 1, position=p)).token_id for p in range(8)]
    assert drawn == [50, 77, 78, 92, 69, 77, 93, 87]


def test_noise_is_standard_exponential():
    codes = token_codes(50_000, torch.device("cpu"))
    noise = exponential_noise(row_keys([(1, 0), (1, 1), (2, 0)], torch.device("cpu")), codes).double()
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    for row in noise:
        assert row.mean().item() == pytest.approx(1, abs=0.02)
        assert row.var().item() == pytest.approx(1, abs=0.05)
        # Kolmogorov-Smirnov: the largest distance from the true distribution function.
        true = 1 - torch.exp(-row.sort().values)
        steps = torch.arange(1, len(row) + 1) / len(row)
        assert (true - steps).abs().max().item() < 1.95 / math.sqrt(len(row))
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max().item() < 0.02


def test_neighbouring_positions_are_independent():
    """Pairs of draws over two tokens: all four outcomes equally often."""
    draws = 4000
    requests = [make_request(seed=11, position=position, temperature=1.0) for position in range(draws + 1)]
    tokens = [t.token_id for t in Sampler(2)(torch.zeros(draws + 1, 2), requests)]
    pairs = Counter(pairwise(tokens))
    statistic = sum((pairs[i, j] - draws / 4) ** 2 / (draws / 4) for i in (0, 1) for j in (0, 1))
    assert statistic < 16.3


def test_greedy_takes_the_largest_and_leaves_the_logits_alone():
    logits = make_logits(5)
    before = logits.clone()
    requests = [make_request(str(row), temperature=0) for row in range(4)]
    requests.append(make_request("4", temperature=0, logit_bias={9: 100.0}, banned=(1,)))
    tokens = Sampler(VOCAB)(logits, requests)
    assert [t.token_id for t in tokens] == [*logits[:4].argmax(-1).tolist(), 9]
    assert torch.equal(logits, before)
    assert Sampler(VOCAB)(logits[:0], []) == []


def test_all_banned_but_one():
    banned = tuple(token for token in range(VOCAB) if token != 42)
    for temperature in (0, 1.0):
        for filters in ({}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}):
            request = make_request(temperature=temperature, banned=banned, **filters)
            assert sample(make_logits()[0], request).token_id == 42


def test_tiny_temperature_and_tiny_top_p_keep_the_likeliest():
    logits = make_logits()[0]
    best = int(logits.argmax())
    for settings in ({"temperature": 1e-30}, {"temperature": 1e-4}, {"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}):
        assert kept_tokens(logits, draws=200, **settings) == {best}


def test_equal_logits_at_the_cutoff_stay_together():
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
    assert kept_tokens(logits, top_k=2) == {1, 2, 3}


def test_logprobs_are_those_of_the_raw_logits():
    logits = make_logits(3).to(torch.bfloat16)
    requests = [
        make_request("a", temperature=0.3, top_k=5, logprobs=4, seed=1, logit_bias={90: 50.0}),
        make_request("b", temperature=0, logprobs=0),
        make_request("c", temperature=1.0),
    ]
    tokens = Sampler(VOCAB)(logits, requests)
    expected = torch.log_softmax(logits.float(), dim=-1)
    values, ids = expected[0].topk(4)
    assert tokens[0] == SampledToken(90, expected[0, 90].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
    assert tokens[1] == SampledToken(int(logits[1].argmax()), expected[1].max().item(), ())
    assert tokens[2].logprob is None
    assert tokens[2].top_logprobs == ()


def test_more_logprobs_than_tokens():
    token = Sampler(3)(make_logits(vocab=3), [make_request(logprobs=20)])[0]
    assert len(token.top_logprobs) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 4}, {"temperature": 0, "logit_bias": {1: 1.0}}])
def test_a_row_without_finite_logits_is_named_and_the_others_can_go_on(bad, settings):
    logits = make_logits(3)
    requests = [make_request(name, seed=3, **settings) for name in "abc"]
    expected = Sampler(VOCAB)(logits, requests)
    logits[1, 50] = bad
    with pytest.raises(BadLogits, match="b") as caught:
        Sampler(VOCAB)(logits, requests)
    assert caught.value.request_ids == ("b",)
    assert isinstance(caught.value, ServingError)
    assert Sampler(VOCAB)(logits[[0, 2]], [requests[0], requests[2]]) == [expected[0], expected[2]]


def test_no_token_left_is_refused_rather_than_guessed():
    with pytest.raises(BadLogits):
        sample(make_logits()[0], make_request(temperature=0, banned=tuple(range(VOCAB))))


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"logit_bias": {3: 1.0, 97: 1.0}}, "logit_bias"), ({"stop_token_ids": (96, 98)}, "stop_token_ids")],
)
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(settings, param):
    with pytest.raises(RequestError, match=param) as caught:
        check_vocab(SamplingParams(**settings), VOCAB)
    assert caught.value.param == param


def test_token_ids_of_the_vocabulary_are_accepted():
    check_vocab(SamplingParams(logit_bias={96: 1.0}, stop_token_ids=(0, 96)), VOCAB)
    check_vocab(SamplingParams(), VOCAB)


# Masks


def mask_of(*token_ids):
    return sum(1 << token_id for token_id in token_ids).to_bytes(-(-VOCAB // 8), "little")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "prompt": (3, 50)},
        {"temperature": 0.0, "logit_bias": {40: 100.0}},
    ],
)
def test_nothing_outside_of_the_mask_is_sampled_and_what_is_inside_as_without_the_others(settings):
    logits = make_logits()[0]
    inside = [3, 50, 96]
    fields = {"prompt": settings.pop("prompt", ())}
    alone = torch.full_like(logits, -1e9).index_copy_(0, torch.tensor(inside), logits[inside])
    for seed in range(50):
        request = make_request(seed=seed, **fields, **settings)._replace(token_mask=mask_of(*inside))
        token_id = sample(logits, request).token_id
        assert token_id in inside
        bare = make_request(seed=seed, **fields, **{k: v for k, v in settings.items() if k != "logit_bias"})
        assert token_id == sample(alone, bare).token_id


def test_rows_without_a_mask_are_as_they_were():
    logits = make_logits(rows=3)
    requests = [make_request(str(row), temperature=0.0) for row in range(3)]
    plain = [token.token_id for token in Sampler(VOCAB)(logits, requests)]
    masked = [requests[0], requests[1]._replace(token_mask=mask_of(7)), requests[2]]
    assert [token.token_id for token in Sampler(VOCAB)(logits, masked)] == [plain[0], 7, plain[2]]


def test_logprobs_are_of_the_raw_logits_whatever_the_mask():
    logits = make_logits()[0]
    expected = logits.log_softmax(-1)
    request = make_request(temperature=0.0, logprobs=2)._replace(token_mask=mask_of(11))
    token = sample(logits, request)
    assert token.token_id == 11
    assert token.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert [token_id for token_id, _ in token.top_logprobs] == expected.topk(2).indices.tolist()


def test_a_mask_over_infinite_logits_does_no_harm_and_an_empty_one_is_named():
    logits = make_logits(rows=2)
    logits[0, 5] = math.nan
    requests = [make_request("a", temperature=0.0)._replace(token_mask=mask_of(8))]
    requests.append(make_request("b", temperature=0.0)._replace(token_mask=mask_of()))
    with pytest.raises(BadLogits) as raised:
        Sampler(VOCAB)(logits, requests)
    assert raised.value.request_ids == ("b",)
    assert sample(logits[0], requests[0]).token_id == 8


def test_a_row_with_few_tokens_left_is_not_sorted_whole(monkeypatch):
    """top_k above what a mask leaves: all that can be drawn is among the leading tokens."""
    vocab = 5000
    sizes = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, **more: sizes.append(k) or topk(self, k, **more))
    mask = sum(1 << token_id for token_id in (9, 4000)).to_bytes(vocab // 8, "little")
    request = make_request(top_k=50)._replace(token_mask=mask)
    assert sample(make_logits(vocab=vocab)[0], request).token_id in (9, 4000)
    assert max(sizes) < vocab
