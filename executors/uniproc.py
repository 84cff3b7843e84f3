"""The executor of one process: a step runs on the engine's thread, when its result is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError, EngineError
from headrace.core.interfaces import KVCacheLayout
from headrace.core.interfaces.build import ExecutorBuild
from headrace.core.plan import StepPlan, StepResult
from headrace.executors.process import ThreadChoice, set_threads
from headrace.executors.runner import ModelRunner

__all__ = ["UniprocExecutor"]


@dataclass(frozen=True)
class _Handle:
    run: Callable[[], StepResult]

    def done(self) -> bool:
        """The step runs inside `result`."""
        return False

    def result(self) -> StepResult:
        """Run the step."""
        return self.run()


class UniprocExecutor:
    """Implements `Executor` with one runner in this process; one plan at a time."""

    max_in_flight = 1
    runs_ahead = False

    def __init__(self, build: ExecutorBuild) -> None:
        parallel = build.config.parallel
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size != 1:
            raise ConfigError(
                f"executor 'uniproc' runs one rank; tensor_parallel_size is {parallel.tensor_parallel_size} and "
                f"pipeline_parallel_size {parallel.pipeline_parallel_size}; both must be 1",
                option="tensor_parallel_size",
            )
        self._build = build
        self._runner: ModelRunner | None = None
        self._threads: ThreadChoice | None = None

    def start(self) -> None:
        """Build and load the model."""
        self._threads = set_threads()
        self._runner = ModelRunner(self._build, "cpu")

    @property
    def runner(self) -> ModelRunner:
        """The runner. Raises `EngineError` before `start` and after `shutdown`."""
        if self._runner is None:
            raise EngineError("the executor is not running: it was not started, or shut down")
        return self._runner

    @property
    def kv_layout(self) -> KVCacheLayout:
        """Groups and page size."""
        return self.runner.layout

    @property
    def lookahead(self) -> int:
        """KV slots the proposer writes behind a request's last token."""
        return self.runner.lookahead

    def allocate_kv(self, num_blocks: int) -> None:
        """Make KV memory."""
        self.runner.allocate_kv(num_blocks)

    def submit(self, plan: StepPlan) -> _Handle:
        """Take a plan; it runs when its result is asked for."""
        return _Handle(lambda: self.runner.execute(plan))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the runner."""
        return [getattr(self.runner, method)(*args, **kwargs)]

    def call_plugin(self, plugin: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of a plugin's runner listener."""
        return [self.runner.call_plugin(plugin, method, *args, **kwargs)]

    def health(self) -> None:
        """Raise `EngineError` if the executor is not running."""
        _ = self.runner

    def report(self) -> Mapping[str, Any]:
        """Facts for the start-up report."""
        threads = self._threads or set_threads()
        facts = {"threads": threads.count, "threads_why": threads.why, "workers": 1}
        return {**self.runner.report, **facts}

    def metrics(self) -> Mapping[str, float]:
        """Gauges by Prometheus name."""
        return {"weights_bytes": float(self.runner.report["weights_bytes"])}

    def shutdown(self) -> None:
        """Let go of model and KV memory."""
        self._runner = None
