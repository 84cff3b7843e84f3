"""Puts an engine together: configuration, model, executor, pool, scheduler, loop."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from headrace.configuration import Started
from headrace.core.config import EngineConfig
from headrace.core.engine import EngineCore
from headrace.core.errors import ConfigError
from headrace.core.interfaces import Checkpoint, Executor, InputProcessor, Tokenizer
from headrace.core.interfaces.build import (
    CoreContext,
    ExecutorBuild,
    FrontContext,
    KVCacheBuild,
    SchedulerBuild,
)
from headrace.core.interfaces.checkpoint import Progress
from headrace.core.kv.sizing import PoolRequest, PoolSize, size_pool
from headrace.core.listeners import Listeners
from headrace.core.plugin.registry import Registry
from headrace.executors.process import available_memory
from headrace.executors.selection import resolve_dtype
from headrace.models.opening import build_tokenizer, model_definition, open_checkpoint, resolve_model
from headrace.report import StartupReport

__all__ = ["Engine", "build_engine"]


@dataclass(frozen=True)
class Engine:
    """A started engine with its front half, in one process."""

    config: EngineConfig
    registry: Registry
    core: EngineCore
    tokenizer: Tokenizer | None
    input_processors: tuple[InputProcessor, ...]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    report: StartupReport


def build_engine(started: Started, progress: Progress | None = None) -> Engine:
    """Find, open, check and load the model, then size the pool and build the loop around it.

    Raises `ConfigError`, `CheckpointError` or `PluginError` before anything is computed.
    """
    begun = time.perf_counter()
    config, registry = started.config, started.plugins.registry
    path = resolve_model(config.model, registry, progress)
    checkpoint = open_checkpoint(path, registry)
    model_len = _model_len(config, checkpoint, registry)
    tokenizer = build_tokenizer(checkpoint, registry)
    build = ExecutorBuild(
        config=config,
        registry=registry,
        model_path=path,
        max_model_len=model_len,
        dtype=resolve_dtype(config.dtype, checkpoint.config),
        checkpoint=checkpoint,
    )
    executor: Executor = registry.get("executor", config.parallel.executor, option="executor").factory(build)
    executor.start()
    size = _size(config, executor, model_len)
    executor.allocate_kv(size.num_blocks)
    core = _core(config, registry, executor, size)
    vocab_size = int(checkpoint.config["vocab_size"])
    context = FrontContext(
        config=config,
        registry=registry,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        chat_template=checkpoint.chat_template,
        eos_token_ids=_eos_ids(checkpoint, tokenizer),
    )
    processors = tuple(entry.factory(context) for entry in registry.entries("input_processor"))
    report = StartupReport(
        model=config.model,
        path=path,
        config=config,
        executor=dict(executor.report()),
        layout=executor.kv_layout,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        plugins=[info.name for info in started.plugins.infos if info.state == "loaded"],
        notes=[*started.notes, *size.notes, *_text_notes(checkpoint, tokenizer)],
        seconds=time.perf_counter() - begun,
    )
    checkpoint.close()
    return Engine(
        config=config,
        registry=registry,
        core=core,
        tokenizer=tokenizer,
        input_processors=processors,
        chat_template=checkpoint.chat_template,
        eos_token_ids=context.eos_token_ids,
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        report=report,
    )


def _model_len(config: EngineConfig, checkpoint: Checkpoint, registry: Registry) -> int:
    """Return the longest request the model is made for, or the shorter one that was asked for."""
    limit = model_definition(checkpoint.config, registry).max_model_len(checkpoint.config)
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked} is more than the {limit} tokens this model was made for; set it to at most "
            f"{limit}",
            option="max_model_len",
        )
    return asked or limit


def _size(config: EngineConfig, executor: Executor, model_len: int) -> PoolSize:
    return size_pool(
        PoolRequest(
            layout=executor.kv_layout,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=model_len,
            max_model_len_is_given=config.max_model_len is not None,
            max_tokens_in_flight=config.scheduler.max_num_batched_tokens * executor.max_in_flight,
            available_bytes=available_memory(),
            num_kv_blocks=config.cache.num_kv_blocks,
            kv_cache_memory=config.cache.kv_cache_memory,
        )
    )


def _core(config: EngineConfig, registry: Registry, executor: Executor, size: PoolSize) -> EngineCore:
    """Build the scheduler with everything it asks, and the loop."""
    wake = threading.Event()
    context = CoreContext(config=config, registry=registry, wake=wake.set)
    listeners = Listeners([entry.factory(context) for entry in registry.entries("engine_listener")])
    kv = registry.get("kv_cache_manager", config.cache.manager, option="kv_cache_manager").factory(
        KVCacheBuild(
            layout=executor.kv_layout,
            num_blocks=size.num_blocks,
            prefix_caching=config.cache.prefix_caching,
            max_tokens_in_flight=config.scheduler.max_num_batched_tokens * executor.max_in_flight,
        )
    )
    policy = registry.get("scheduling_policy", config.scheduler.policy, option="scheduling_policy").factory()
    scheduler = registry.get("scheduler", config.scheduler.name, option="scheduler_name").factory(
        SchedulerBuild(
            kv=kv,
            policy=policy,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=size.max_model_len,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            lookahead=executor.lookahead,
            runs_ahead=executor.runs_ahead,
            constraints=[entry.factory(context) for entry in registry.entries("constraint")],
            listener=listeners,
        )
    )
    return EngineCore(scheduler, executor, listeners, wake)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end an answer, the tokenizer's first."""
    stated = checkpoint.generation_config.get("eos_token_id") or []
    more = [stated] if isinstance(stated, int) else list(stated)
    return tuple(dict.fromkeys([*(tokenizer.eos_token_ids if tokenizer else ()), *more]))


def _text_notes(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return ["this model has no tokenizer: prompts and answers are token ids"]
    if checkpoint.chat_template is None:
        return ["this model has no chat template: chat is not available unless one is given; generate works"]
    return []
