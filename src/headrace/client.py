"""The engine in this process, as a caller drives it: submit, step, abort."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.assembly import Engine
from headrace.core.errors import EngineError
from headrace.frontend import Prepared
from headrace.output.processor import OutputProcessor
from headrace.outputs import RequestUpdate

__all__ = ["InProcessClient"]


class InProcessClient:
    """Runs the engine's loop on the caller's thread."""

    def __init__(self, engine: Engine) -> None:
        self._core = engine.core
        self._outputs = OutputProcessor(engine.tokenizer)

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
