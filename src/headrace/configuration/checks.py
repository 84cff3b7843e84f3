"""Values against each other, against the parts that plugins registered, and against the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.configuration.given import Given
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.plugin.registry import KINDS, Registry

__all__ = ["SELECTING", "check_device", "check_parallel", "check_selected", "fit_sequences"]

SELECTING = {kind.option: kind.name for kind in KINDS.values() if kind.option and kind.option != "model"}
"""Options that select a part by name, and the kind of part each selects."""


def fit_sequences(config: EngineConfig, given: Mapping[str, Given]) -> tuple[EngineConfig, str | None]:
    """Keep max_num_seqs within max_num_batched_tokens: a default gives way with a note, two explicit values clash.

    Raises `ConfigError`.
    """
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens >= scheduler.max_num_seqs:
        return config, None
    tokens, seqs = given.get("max_num_batched_tokens"), given.get("max_num_seqs")
    if seqs is None:
        lowered = scheduler.model_copy(update={"max_num_seqs": scheduler.max_num_batched_tokens})
        note = (
            f"max_num_seqs lowered from its default {scheduler.max_num_seqs} to {lowered.max_num_seqs}, since a "
            f"step holds max_num_batched_tokens={scheduler.max_num_batched_tokens} tokens"
        )
        return config.model_copy(update={"scheduler": lowered}), note
    raise ConfigError(
        f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}, {tokens.source if tokens else 'default'}) must "
        f"be at least max_num_seqs ({scheduler.max_num_seqs}, {seqs.source}): every running request needs a token a "
        "step; raise the first or lower the second",
        option="max_num_batched_tokens",
    )


def check_device(config: EngineConfig, device: str) -> None:
    """Refuse options that mean nothing on the device. Raises `ConfigError`."""
    share = config.cache.gpu_memory_utilization
    if device == "cpu" and share is not None:
        raise ConfigError(
            f"gpu_memory_utilization ({share}) has no meaning on a CPU, whose memory is shared with everything else; "
            "say how much the KV cache may take: kv_cache_memory, such as 2GiB",
            option="gpu_memory_utilization",
        )


def check_parallel(config: EngineConfig, registry: Registry) -> None:
    """Refuse several ranks where the executor runs one. Raises `ConfigError`."""
    parallel = config.parallel
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, option)
        if size > 1 and parallel.executor == "uniproc":
            others = [name for name in registry.names("executor") if name != "uniproc"]
            raise ConfigError(
                f"{option} is {size}, but the executor 'uniproc' runs one rank (allowed: 1); executors that can run "
                f"more: {', '.join(others) or 'none is installed'}; the option is executor",
                option=option,
            )


def check_selected(values: Mapping[str, Any], registry: Registry) -> None:
    """Refuse names that no registered part has. `values` are those given, by flat name. Raises `ConfigError`."""
    for option, kind in SELECTING.items():
        name = values.get(option)
        if name is not None and not (option == "attention_backend" and name == "auto"):
            registry.get(kind, name, option=option)
