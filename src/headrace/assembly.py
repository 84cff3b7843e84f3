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
from headrace.generation_defaults import GenerationDefaults
from headrace.models.bridge.choose import definition_for
from headrace.models.opening import build_tokenizer, open_checkpoint, reading_configuration, resolve_model
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
    causal: bool
    """False: the model is an encoder."""
    defaults: GenerationDefaults
    """The model's own sampling defaults."""
    report: StartupReport


def build_engine(started: Started, progress: Progress | None = None) -> Engine:
    """Find, open, check and load the model, then size the pool and build the loop around it.

    Raises `ConfigError`, `CheckpointError` or `PluginError` before anything is computed.
    """
    begun = time.perf_counter()
    config, registry = started.config, started.plugins.registry
    path = resolve_model(config.model, registry, progress)
    checkpoint = open_checkpoint(path, registry)
    with reading_configuration(checkpoint):
        definition, chosen = definition_for(checkpoint.config, registry, config.model_impl)
        longest = definition.max_model_len(checkpoint.config)
    model_len = _model_len(config, longest)
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
    causal = bool(executor.report().get("causal", True))
    notes = [] if chosen is None else [chosen]
    if not causal:
        model_len, shorter = _one_step_len(config, model_len)
        notes += shorter
    size = _size(config, executor, model_len)
    executor.allocate_kv(size.num_blocks)
    core = _core(config, registry, executor, size, causal=causal)
    vocab_size = int(checkpoint.config["vocab_size"])
    context = FrontContext(
        config=config,
        registry=registry,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        chat_template=checkpoint.chat_template,
        eos_token_ids=_eos_ids(checkpoint, tokenizer),
        causal=causal,
        model_path=path,
    )
    defaults = GenerationDefaults(checkpoint.generation_config if config.generation_config == "auto" else {})
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
        notes=[
            *started.notes,
            *notes,
            *size.notes,
            *_text_notes(checkpoint, tokenizer, causal=causal),
            *defaults.notes(),
        ],
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
        causal=causal,
        defaults=defaults,
        report=report,
    )


def _model_len(config: EngineConfig, limit: int) -> int:
    """Return the longest request the model is made for, or the shorter one that was asked for."""
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked} is more than the {limit} tokens this model was made for; set it to at most "
            f"{limit}",
            option="max_model_len",
        )
    return asked or limit


def _one_step_len(config: EngineConfig, model_len: int) -> tuple[int, list[str]]:
    """Return how long a prompt of an encoder may be, which one step must hold, with a note where that is shorter.

    Raises `ConfigError` where the length was asked for.
    """
    scheduler = config.scheduler
    threshold = scheduler.long_prefill_token_threshold
    room, option = scheduler.max_num_batched_tokens, "max_num_batched_tokens"
    if threshold and threshold < room:
        room, option = threshold, "long_prefill_token_threshold"
    if room >= model_len:
        return model_len, []
    shortage = f"an encoder reads a prompt whole, in one step, and {option} is {room}"
    if config.max_model_len is not None or room < 2:
        raise ConfigError(
            f"{shortage}, which is less than max_model_len {model_len}; raise {option} to at least {model_len}, or "
            "lower max_model_len",
            option=option,
        )
    return room, [f"max_model_len lowered to {room}: {shortage}"]


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


def _core(
    config: EngineConfig, registry: Registry, executor: Executor, size: PoolSize, *, causal: bool
) -> EngineCore:
    """Build the scheduler with everything it asks, and the loop."""
    wake = threading.Event()
    context = CoreContext(config=config, registry=registry, wake=wake.set, causal=causal)
    listeners = Listeners([entry.factory(context) for entry in registry.entries("engine_listener")])
    kv = registry.get("kv_cache_manager", config.cache.manager, option="kv_cache_manager").factory(
        KVCacheBuild(
            layout=executor.kv_layout,
            num_blocks=size.num_blocks,
            # What an encoder makes of a token depends on those behind it: nothing of it can be shared.
            prefix_caching=config.cache.prefix_caching and causal,
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


def _text_notes(checkpoint: Checkpoint, tokenizer: Tokenizer | None, *, causal: bool) -> list[str]:
    if tokenizer is None:
        return ["this model has no tokenizer: prompts and answers are token ids"]
    if not causal:
        return ["this model is an encoder: embed works; generate, chat and prefix caching do not"]
    if checkpoint.chat_template is None:
        return ["this model has no chat template: chat is not available unless one is given; generate works"]
    return []
