"""The engine in this process: its loop runs on the caller's thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from headrace.executors.openmp import waiting_environ

if "torch" not in sys.modules:  # its OpenMP runtime reads the environment once, when it is loaded
    os.environ.update(waiting_environ(os.environ))

from headrace.assembly import Engine, build_engine
from headrace.configuration import Started
from headrace.core.errors import EngineError
from headrace.core.interfaces.checkpoint import Progress
from headrace.frontend import Prepared
from headrace.output.processor import OutputProcessor
from headrace.outputs import RequestUpdate

__all__ = ["InProcessClient"]


class InProcessClient:
    """Implements `EngineClient`. Raises as `build_engine` does."""

    def __init__(self, started: Started, progress: Progress | None = None) -> None:
        self.engine: Engine = build_engine(started, progress)
        self.front = self.engine.front
        self.report = self.engine.report
        self._core = self.engine.core
        self._outputs = OutputProcessor(self.front.tokenizer)

    def submit(self, request: Prepared) -> None:
        """Hand a request to the engine."""
        self._outputs.add(request.front)
        for part in request.engine:
            self._core.add(part)

    def step(self) -> list[RequestUpdate]:
        """Run the loop once; returns what is new. Raises `EngineError` once the engine has stopped."""
        processed = self._outputs.process(self._core.step())
        for request_id, reason in processed.to_finish:
            self._core.finish([request_id], reason)
        return processed.updates

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests, and run the loop until the engine has let go of them."""
        processed = self._outputs.abort(request_ids)
        for request_id, reason in processed.to_finish:
            self._core.finish([request_id], reason)
        while self._core.has_work and not self._outputs.num_unfinished:
            try:
                self._core.step()
            except EngineError:
                break  # a stopped engine has nothing left to let go of
        return processed.updates

    @property
    def num_unfinished(self) -> int:
        """Requests that are not finished."""
        return self._outputs.num_unfinished

    def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`."""
        return self._core.call(plugin, method, args)

    def metrics(self) -> dict[str, float]:
        """Series by Prometheus name, without prefix."""
        return dict(self._core.metrics())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while requests hold blocks."""
        return self._core.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free model and memory; may be called twice."""
        self._core.shutdown()
