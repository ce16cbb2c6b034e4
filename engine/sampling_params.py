"""What a request asks of the sampler. Torch-free, so that the server can build and check it."""

import math
from dataclasses import dataclass, field

from engine.errors import RequestError
from engine.grammar import Grammar

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 1024
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 1000.0
"""Logits times or through it stay within float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked sampling settings; field names and meanings are those of the OpenAI API and vLLM's extensions.

    `seed` is always set (the server draws one where the client gave none): a draw depends on (seed, output position)
    only, so every node that samples the same position of the same request draws the same token.

    Raises `RequestError` naming the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else is sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never holds: their last token is not sampled after the others."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    """None: no logprobs. n: the sampled token's, and those of the n likeliest tokens."""
    grammar: Grammar | None = None
    """What the output must look like. It goes before `min_tokens`, and ends the output where nothing
    can follow."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, given those before it."""

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be in [0, max_tokens]", self.min_tokens)
        _require(0 <= self.temperature < math.inf, "temperature", "must be a finite number >= 0", self.temperature)
        _require(0 <= self.top_k <= MAX_TOP_K, "top_k", f"must be in [0, {MAX_TOP_K}] (0: off)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]", self.min_p)
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            f"must be in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}]",
            self.repetition_penalty,
        )
        _require(len(self.stop_token_ids) <= MAX_STOPS, "stop_token_ids", f"must be at most {MAX_STOPS}", "more")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, "must be in [-2, 2]", getattr(self, name))
        for token_id, bias in self.logit_bias.items():
            _require(token_id >= 0, "logit_bias", "token ids must be >= 0", token_id)
            _require(-100 <= bias <= 100, "logit_bias", "values must be in [-100, 100]", bias)
        for name in ("stop_token_ids", "allowed_token_ids"):
            _require(all(token_id >= 0 for token_id in getattr(self, name)), name, "must be >= 0", "less")
        _require(all(self.bad_words), "bad_words", "must each hold at least one token", "none")
        _require(0 <= self.seed <= MAX_SEED, "seed", f"must be in [0, {MAX_SEED}]", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be in [0, {MAX_LOGPROBS}]", value)

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must see the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check_vocab(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have. The server calls this before it accepts a request.

    Apart from `SamplingParams`, which is made without knowing the model. Raises `RequestError` naming the field.
    """
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        largest = max(getattr(sampling, name), default=0)
        _require(largest < vocab_size, name, f"token ids must be below the vocabulary's size {vocab_size}", largest)


def _require(holds: bool, param: str, rule: str, value: object) -> None:
    if not holds:
        raise RequestError(f"{param} {rule}, got {value}", param=param)
