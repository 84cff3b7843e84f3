"""What factories are given when an engine is put together, room by room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import EngineError

if TYPE_CHECKING:
    from headrace.core.config import EngineConfig
    from headrace.core.errors import HeadraceError
    from headrace.core.interfaces.checkpoint import Checkpoint
    from headrace.core.interfaces.kv_cache import KVCacheLayout, KVCacheManager
    from headrace.core.interfaces.model import Model
    from headrace.core.interfaces.scheduling import Constraint, EngineListener, SchedulingPolicy
    from headrace.core.interfaces.text import Tokenizer
    from headrace.core.plugin.registry import Registry
    from headrace.core.request import FinishReason

__all__ = [
    "CoreContext",
    "EngineCalls",
    "ExecutorBuild",
    "FrontContext",
    "HttpContext",
    "KVCacheBuild",
    "SchedulerBuild",
    "WorkerContext",
]


def _no_tokenizer() -> None:
    return None


def _not_running(*_: Any) -> Any:
    raise EngineError("the engine's loop is not there yet: a factory was still running when it was asked")


@dataclass(frozen=True)
class FrontContext:
    """Front end: for input processors."""

    config: EngineConfig
    registry: Registry
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    chat_template: str | None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer: the tokenizer's, and those of the model's generation configuration."""
    causal: bool = True
    """False: the model is an encoder, which has hidden states and no logits."""
    model_path: Path | None = None
    """The checkpoint, a file or a folder."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What parts of the core half keep for all front ends (`CoreContext.share`); it changes while the engine runs."""


class EngineCalls(Protocol):
    """What an HTTP route may ask of the engine; all of it waits without blocking other clients."""

    async def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name, without prefix."""
        ...


@dataclass(frozen=True)
class HttpContext:
    """HTTP server: for routes of plugins."""

    app: Any
    """The `fastapi.FastAPI` application; add routes to it. Every path but those of probes asks for the API key, and
    /debug exists in developer mode alone."""
    engine: EngineCalls
    config: EngineConfig
    registry: Registry


@dataclass(frozen=True)
class CoreContext:
    """Engine core: for constraints, engine listeners and schedulers."""

    config: EngineConfig
    registry: Registry
    wake: Callable[[], None]
    """Thread-safe: the loop looks at parked requests again."""
    finish: Callable[[Sequence[str], FinishReason, HeadraceError | None], None] = _not_running
    """Thread-safe: the loop ends these requests before its next step; ids it does not know are passed over."""
    snapshot: Callable[[], Mapping[str, Any]] = _not_running
    """On the loop's thread: `EngineCore.snapshot`."""
    share: Callable[[str, Any], None] = _not_running
    """Thread-safe: keep a value by name for every front end there is or will be (`FrontContext.shared`); plain
    values, the latest of a name counts."""
    causal: bool = True
    """False: a token sees those behind it as well, so a prompt runs whole in one step or not at all."""
    tokenizer: Callable[[], Tokenizer | None] = _no_tokenizer
    """Makes the model's tokenizer; that takes seconds, so ask on a thread of your own, once."""
    vocab_size: int = 0
    """Columns of the model's logits."""


@dataclass(frozen=True)
class KVCacheBuild:
    """For KV cache managers."""

    layout: KVCacheLayout
    num_blocks: int
    prefix_caching: bool
    max_tokens_in_flight: int
    """Tokens of one request that plans in flight may hold at once, lookahead included."""


@dataclass(frozen=True)
class SchedulerBuild:
    """For schedulers."""

    kv: KVCacheManager
    policy: SchedulingPolicy
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    lookahead: int = 0
    """KV slots to grant behind a request's last token."""
    runs_ahead: bool = False
    """See `Executor.runs_ahead`."""
    constraints: Sequence[Constraint] = ()
    listener: EngineListener | None = None
    """All engine listeners as one; to be told of `on_add`, `on_preempt` and `on_finish`. It never raises."""


@dataclass(frozen=True)
class ExecutorBuild:
    """For executors: enough to build workers here or in another process."""

    config: EngineConfig
    registry: Registry
    model_path: Path
    max_model_len: int
    dtype: str
    checkpoint: Checkpoint | None = None
    """The checkpoint, where the caller has it open in this process; otherwise each worker opens `model_path`."""


@dataclass(frozen=True)
class WorkerContext:
    """Worker: for runner listeners and proposers."""

    config: EngineConfig
    registry: Registry
    device: str
    vocab_size: int
    model_config: Mapping[str, Any]
    model_path: Path
    """The checkpoint, a file or a folder."""
    max_model_len: int
    """The longest request there can be; the pool may lower it later."""
    dtype: str
    """What the model computes in."""
    model: Model
    """The model, built. Its embedding and output projection are for all; its forward pass is the runner's."""
    tokenizer: Callable[[], Tokenizer | None] = _no_tokenizer
    """As in `CoreContext`."""
