"""Puts an engine together: configuration, model, executor, pool, scheduler, loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.configuration import Started
from headrace.core.config import EngineConfig
from headrace.core.engine import EngineCore, Wake
from headrace.core.errors import ConfigError
from headrace.core.interfaces import Executor
from headrace.core.interfaces.build import CoreContext, ExecutorBuild, KVCacheBuild, SchedulerBuild
from headrace.core.interfaces.checkpoint import Checkpoint, Progress
from headrace.core.kv.sizing import PoolRequest, PoolSize, size_pool
from headrace.core.listeners import Listeners
from headrace.core.plugin.registry import Registry
from headrace.executors.process import available_memory
from headrace.executors.selection import resolve_dtype
from headrace.front_half import FrontHalf, ModelFacts, build_front, generation_defaults
from headrace.models.bridge.choose import definition_for
from headrace.models.opening import build_tokenizer, open_checkpoint, reading_configuration, resolve_model
from headrace.models.sources.aliases import ALIASES
from headrace.report import StartupReport

__all__ = ["CoreHalf", "Engine", "build_core", "build_engine"]


@dataclass(frozen=True)
class CoreHalf:
    """A loaded model with the loop that runs it, and what others have to know of it."""

    core: EngineCore
    facts: ModelFacts
    report: StartupReport


@dataclass(frozen=True)
class Engine:
    """A started engine: both halves, in one process."""

    core: EngineCore
    front: FrontHalf
    report: StartupReport


def build_engine(started: Started, progress: Progress | None = None) -> Engine:
    """Build both halves. Raises as `build_core` and `build_front` do."""
    shared: dict[str, Any] = {}
    half = build_core(started, progress, share=shared.__setitem__)
    front = build_front(started.config, started.plugins.registry, half.facts, shared)
    return Engine(core=half.core, front=front, report=half.report)


def build_core(
    started: Started,
    progress: Progress | None = None,
    *,
    wake: Wake | None = None,
    share: Callable[[str, Any], None],
) -> CoreHalf:
    """Find, open, check and load the model, then size the pool and build the loop around it.

    wake: what the loop sleeps on; None: an event.
    share: see `CoreContext.share`.
    Raises `ConfigError`, `CheckpointError` or `PluginError` before anything is computed.
    """
    begun = time.perf_counter()
    config, registry = _with_alias(started.config), started.plugins.registry
    path = resolve_model(config.model, registry, progress)
    checkpoint = open_checkpoint(path, registry)
    with reading_configuration(checkpoint):
        definition, chosen = definition_for(checkpoint.config, registry, config.model_impl)
        longest = definition.max_model_len(checkpoint.config)
    model_len = _model_len(config, longest)
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
    causal = _is_causal(executor)
    notes = [] if chosen is None else [chosen]
    if not causal:
        model_len, shorter = _one_step_len(config, model_len)
        notes += shorter
    size = _size(config, executor, model_len)
    executor.allocate_kv(size.num_blocks)
    facts = _facts(path, checkpoint, executor, size)
    checkpoint.close()
    core = _core(config, registry, executor, size, facts, wake=wake or threading.Event(), share=share)
    defaults = generation_defaults(config, facts.generation_config)
    report = StartupReport(
        model=config.model,
        path=facts.path,
        executor=dict(executor.report()),
        num_blocks=size.num_blocks,
        block_size=executor.kv_layout.block_size,
        page_bytes=executor.kv_layout.page_bytes,
        windows=[group.window for group in executor.kv_layout.groups],
        max_model_len=size.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        policy=config.scheduler.policy,
        prefix_caching=config.cache.prefix_caching and causal,
        executor_name=config.parallel.executor,
        plugins=[info.name for info in started.plugins.infos if info.state == "loaded"],
        notes=[*started.notes, *notes, *size.notes, *_text_notes(facts), *defaults.notes()],
        seconds=time.perf_counter() - begun,
    )
    return CoreHalf(core, facts, report)


def _facts(path: Path, checkpoint: Checkpoint, executor: Executor, size: PoolSize) -> ModelFacts:
    """Return what the front half must know; the checkpoint is closed afterwards."""
    return ModelFacts(
        path=str(path),
        tokenizer=None if checkpoint.tokenizer is None else dict(checkpoint.tokenizer),
        chat_template=checkpoint.chat_template,
        generation_config=dict(checkpoint.generation_config),
        vocab_size=int(checkpoint.config["vocab_size"]),
        max_model_len=size.max_model_len,
        causal=_is_causal(executor),
        fingerprint=str(executor.report().get("fingerprint", "")),
    )


def _is_causal(executor: Executor) -> bool:
    return bool(executor.report().get("causal", True))


def _with_alias(config: EngineConfig) -> EngineConfig:
    """Hold weights as the model's short name means it, where nothing else is asked for."""
    alias = ALIASES.get(config.model)
    if alias is None or alias.quantization is None or config.quantization is not None:
        return config
    return config.model_copy(update={"quantization": alias.quantization})


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
            max_tokens_in_flight=_in_flight(config, executor),
            available_bytes=available_memory(),
            num_kv_blocks=config.cache.num_kv_blocks,
            kv_cache_memory=config.cache.kv_cache_memory,
        )
    )


def _in_flight(config: EngineConfig, executor: Executor) -> int:
    """Return how many tokens behind its valid KV one request may hold slots for, those of drafting included."""
    return config.scheduler.max_num_batched_tokens * executor.max_in_flight + executor.lookahead


def _core(
    config: EngineConfig,
    registry: Registry,
    executor: Executor,
    size: PoolSize,
    facts: ModelFacts,
    *,
    wake: Wake,
    share: Callable[[str, Any], None],
) -> EngineCore:
    """Build the scheduler with everything it asks, and the loop."""
    loop: list[EngineCore] = []  # parts are made before it, and ask for it when it runs
    context = CoreContext(
        config=config,
        registry=registry,
        wake=wake.set,
        causal=facts.causal,
        tokenizer=partial(build_tokenizer, facts.tokenizer, registry),
        vocab_size=facts.vocab_size,
        finish=lambda ids, reason, error: loop[0].finish(ids, reason, error),
        snapshot=lambda: loop[0].snapshot(),
        share=share,
    )
    parts: dict[str, list[object]] = {}

    def build_all(kind: str) -> list[Any]:
        built = []
        for entry in registry.entries(kind):
            built.append(entry.factory(context))
            parts.setdefault(entry.plugin, []).append(built[-1])
        return built

    listeners = Listeners(build_all("engine_listener"))
    kv = registry.get("kv_cache_manager", config.cache.manager, option="kv_cache_manager").factory(
        KVCacheBuild(
            layout=executor.kv_layout,
            num_blocks=size.num_blocks,
            # What an encoder makes of a token depends on those behind it: nothing of it can be shared.
            prefix_caching=config.cache.prefix_caching and facts.causal,
            max_tokens_in_flight=_in_flight(config, executor),
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
            constraints=build_all("constraint"),
            listener=listeners,
        )
    )
    loop.append(EngineCore(scheduler, executor, listeners, wake, parts))
    return loop[0]


def _text_notes(facts: ModelFacts) -> list[str]:
    if facts.tokenizer is None:
        return ["this model has no tokenizer: prompts and answers are token ids"]
    if not facts.causal:
        return ["this model is an encoder: embed works; generate, chat and prefix caching do not"]
    if facts.chat_template is None:
        return ["this model has no chat template: chat is not available unless one is given; generate works"]
    return []
