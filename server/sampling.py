"""From a request body to `SamplingParams`: defaults, the room left for output, one seed per choice."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import RequestError
from engine.grammar import Grammar
from engine.sampling_params import MAX_SEED, SamplingParams, check_vocab
from server.model_assets import ModelAssets
from server.protocol import GenerationBody
from server.tokenizer import Tokenizer

_NO_BUDGET_YET = MAX_SEED
_MAX_ID_DIGITS = 10

_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)


def base_sampling(
    body: GenerationBody,
    assets: ModelAssets,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """What all choices share; `for_choice` adds the output budget.

    What the client leaves out is what the checkpoint's generation_config.json says, else OpenAI's default. Raises
    `RequestError` naming the field.
    """
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    values: dict[str, Any] = {**assets.sampling_defaults, **given}
    if values.get("top_k") == -1:
        values["top_k"] = 0  # vLLM's older spelling of "off"
    sampling = SamplingParams(
        **values,
        max_tokens=_NO_BUDGET_YET,
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=_bad_words(body.bad_words or (), assets.tokenizer),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=secrets.randbelow(MAX_SEED) if body.seed is None else body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    check_vocab(sampling, assets.vocab_size)
    return sampling


def for_choice(base: SamplingParams, index: int, max_tokens: int) -> SamplingParams:
    """Choice `index` of n: the same request under its own seed."""
    return replace(base, max_tokens=max_tokens, seed=(base.seed + index) % (MAX_SEED + 1))


def output_budget(
    asked: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int, *, prompt_param: str = "prompt"
) -> int:
    """`max_tokens` for a prompt of this length. A default shrinks to the room there is; what was asked for must fit."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, at least one of them for the output, "
            f"but the prompt has {num_prompt_tokens} tokens.",
            param=prompt_param,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked < 1:
        raise RequestError(f"max_tokens must be at least 1, got {asked}", param="max_tokens")
    if asked > room:
        raise RequestError(
            f"max_tokens is too large: {asked}. This model's maximum context length is {max_model_len} tokens and the "
            f"prompt has {num_prompt_tokens}, so that {num_prompt_tokens + asked} would be needed.",
            param="max_tokens",
        )
    return asked


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each as it is spelled at the start of a text and, where a space makes it another token, after one."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        if not bare:
            raise RequestError(f"bad_words: {word!r} is no word", param="bad_words")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has no integer keys, so they come as text."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: keys must be token ids, got {key!r}", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
