"""What factories are given when an engine is put together, room by room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.config import EngineConfig
    from headrace.core.interfaces.kv_cache import KVCacheLayout
    from headrace.core.interfaces.text import Tokenizer
    from headrace.core.plugin.registry import Registry

__all__ = ["CoreContext", "ExecutorBuild", "FrontContext", "KVCacheBuild", "WorkerContext"]


@dataclass(frozen=True)
class FrontContext:
    """Front end: for input processors."""

    config: EngineConfig
    registry: Registry
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    chat_template: str | None


@dataclass(frozen=True)
class CoreContext:
    """Engine core: for constraints, engine listeners and schedulers."""

    config: EngineConfig
    registry: Registry
    wake: Callable[[], None]
    """Thread-safe: the loop looks at parked requests again."""


@dataclass(frozen=True)
class KVCacheBuild:
    """For KV cache managers."""

    layout: KVCacheLayout
    num_blocks: int
    prefix_caching: bool
    max_num_batched_tokens: int


@dataclass(frozen=True)
class ExecutorBuild:
    """For executors: enough to build workers here or in another process."""

    config: EngineConfig
    registry: Registry
    model_path: Path
    max_model_len: int
    dtype: str


@dataclass(frozen=True)
class WorkerContext:
    """Worker: for runner listeners and proposers."""

    config: EngineConfig
    registry: Registry
    device: str
    vocab_size: int
    model_config: Mapping[str, Any]
