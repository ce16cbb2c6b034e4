"""The engine's settings: frozen, checked once, messages that name the flag.

Flags are derived from these fields (`num_blocks` is `--num-blocks`; the text under a field is its help).
What is measured at run time, such as the number of blocks that fit, is a return value and not a setting.
"""

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which weights to serve, and how."""

    model: str
    """Built-in name (smollm2-135m), a transformers-format directory, a Hugging Face id, or a .gguf file."""
    dtype: DType = "auto"
    """Type of weights, activations and KV. auto: float32 on a CPU (equal to transformers), bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. Default: what the model was made for, or less if the cache is smaller."""

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model", "must not be empty", self.model)
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            "--max-model-len",
            "must be at least 2",
            self.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks to allocate. Overrides --kv-cache-bytes."""
    kv_cache_bytes: int = 1 << 30
    """Memory for KV in bytes."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, "--block-size", "must be at least 1", self.block_size)
        _require(self.num_blocks is None or self.num_blocks >= 1, "--num-blocks", "must be at least 1", self.num_blocks)
        _require(self.kv_cache_bytes >= 1, "--kv-cache-bytes", "must be at least 1", self.kv_cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a step's token budget is spent."""

    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    max_num_seqs: int = 128
    """Most requests running at once."""
    long_prefill_token_threshold: int = 512
    """Most prompt tokens of one request computed in one step; 0 for no limit."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """A request whose KV cannot be loaded: recompute what is missing on this node, or end in an error."""
    watermark_blocks: int = 1
    """Blocks kept free when a request is admitted, so that running ones can grow before anybody is preempted."""

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, "--max-num-seqs", "must be at least 1", self.max_num_seqs)
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "--max-num-batched-tokens",
            f"must be at least --max-num-seqs ({self.max_num_seqs}), one token for each running request",
            self.max_num_batched_tokens,
        )
        _require(
            self.long_prefill_token_threshold >= 0,
            "--long-prefill-token-threshold",
            "must be >= 0 (0: no limit)",
            self.long_prefill_token_threshold,
        )
        _require(self.watermark_blocks >= 0, "--watermark-blocks", "must be >= 0", self.watermark_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything one engine needs to know."""

    model: ModelOptions
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


def _require(holds: bool, flag: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{flag} {rule}, got {value}")
