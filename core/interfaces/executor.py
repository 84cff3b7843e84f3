"""The executor contract: where steps run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace.core.interfaces.kv_cache import KVCacheLayout
    from headrace.core.plan import StepPlan, StepResult

__all__ = ["Executor", "StepHandle"]


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step; raises what the step raised."""
        ...

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Owns workers, models and KV memory. Called on the engine's thread."""

    max_in_flight: int
    """How many plans may be out at once; results come in the order they were submitted."""
    runs_ahead: bool
    """Whether a request may be in a plan before the id its last one samples is known to the core: the worker
    uses the id it sampled itself. False: such a request waits for its result."""

    def start(self) -> None:
        """Build workers and models; afterwards `kv_layout` and `lookahead` are known. Slow."""
        ...

    @property
    def kv_layout(self) -> KVCacheLayout:
        """Groups and page size, over the model's and the proposer's layers."""
        ...

    @property
    def lookahead(self) -> int:
        """KV slots the proposer writes behind a request's last token."""
        ...

    def allocate_kv(self, num_blocks: int) -> None:
        """Make KV memory for block ids [0, num_blocks]; id 0 is the null block. Once, before `submit`."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Send a plan. Never blocks; at most `max_in_flight` plans are out."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, after the plans already sent; one answer a worker.

        `reset` every worker has: it forgets all requests and keeps model and KV memory.
        """
        ...

    def call_plugin(self, plugin: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of a plugin's worker half, after the plans already sent; one answer a worker."""
        ...

    def health(self) -> None:
        """Raise `EngineError` if a worker is gone."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Facts for the start-up report: parameters, weight bytes, backend, why others were not taken, …

        `causal`: False where a layer is not; where it is missing all are.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name, without prefix."""
        ...

    def shutdown(self) -> None:
        """End workers and free memory; may be called twice."""
        ...
