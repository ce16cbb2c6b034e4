"""Puts an engine together, in named steps: plan (sizes, before anything heavy), then weights, KV, worker, scheduler."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint_tensors import weights_digest
from engine.config import CacheConfig, EngineConfig
from engine.decoder import Decoder
from engine.engine import Engine
from engine.errors import ConfigError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_pool import GrammarPool
from engine.kv_cache import KVCache, KVLayout, resolve_num_blocks
from engine.kv_connector import SchedulerConnector, WorkerConnector
from engine.model_config import ModelConfig, resolve_max_model_len
from engine.model_source import resolve_model
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.weights import load_weights, resolve_dtype
from engine.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What will be built. Everything that can be refused has been refused by now."""

    directory: Path
    model: ModelConfig
    layout: KVLayout
    max_model_len: int
    weights_digest: str

    @property
    def dtype_name(self) -> str:
        return str(self.layout.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The two ends of a connector, and the memory that it wants the KV in, if any."""

    scheduler: SchedulerConnector
    worker: WorkerConnector
    buffer: memoryview | None = None


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Reads the checkpoint's description and fixes all sizes. Raises `ConfigError` naming the flag."""
    directory = resolve_model(config.model.model)
    model = ModelConfig.from_checkpoint(directory)
    dtype = resolve_dtype(config.model.dtype)
    num_blocks = resolve_num_blocks(model, config.cache, dtype)
    layout = KVLayout.of_model(model, num_blocks=num_blocks, block_size=config.cache.block_size, dtype=dtype)
    _check_memory(layout, config.cache)
    max_model_len = resolve_max_model_len(model, config.model.max_model_len, num_cache_tokens=layout.num_tokens)
    return EnginePlan(
        directory=directory,
        model=model,
        layout=layout,
        max_model_len=max_model_len,
        weights_digest=weights_digest(directory),
    )


def build_engine(
    plan: EnginePlan,
    config: EngineConfig,
    connection: Connection | None,
    clock: Callable[[], float],
    wake: Callable[[], None] = lambda: None,
) -> Engine:
    """Loads the weights and allocates the KV cache; the connector opens its sockets here.

    `wake` is called from other threads when a step could do something that the last one could not.
    """
    # Now, and not with the first grammar: reading the tokenizer would stop the step loop for half a second.
    grammars = GrammarPool(lambda: GrammarCompiler.of_checkpoint(plan.directory), wake)
    weights = load_weights(plan.directory, plan.model, plan.layout.dtype)
    kv_cache = KVCache.allocate(plan.layout, connection.buffer if connection is not None else None)
    worker = Worker(
        Decoder(plan.model, weights),
        kv_cache,
        Sampler(plan.model.vocab_size),
        connection.worker if connection is not None else None,
    )
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        plan.layout.num_blocks,
        plan.max_model_len,
        model_digest=plan.model.digest() + plan.weights_digest,
        vocab_size=plan.model.vocab_size,
        connector=connection.scheduler if connection is not None else None,
        grammars=grammars,
        clock=clock,
    )
    return Engine(scheduler, worker, grammars)


def use_threads(num_threads: int | None, cpus: tuple[int, ...]) -> int:
    """Binds the process to `cpus` and returns the number of threads that the arithmetic will use."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads or available)
    return torch.get_num_threads()


def _check_memory(layout: KVLayout, cache: CacheConfig) -> None:
    available = _available_memory()
    if available is not None and layout.total_bytes > available:
        flag = "--kv-cache-bytes" if cache.num_blocks is None else "--num-blocks"
        raise ConfigError(
            f"{flag} asks for {layout.total_bytes} bytes of KV, but only {available} bytes of memory are available"
        )


def _available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
