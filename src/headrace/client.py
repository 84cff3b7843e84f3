"""An engine, as a caller drives it: submit, step, abort. What differs is where the loop runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from headrace.front_half import FrontHalf
from headrace.frontend import Prepared
from headrace.outputs import RequestUpdate
from headrace.report import StartupReport

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """One engine and the requests of one caller. Not thread-safe."""

    front: FrontHalf
    report: StartupReport

    def submit(self, request: Prepared) -> None:
        """Hand a request to the engine."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Wait for something new, and return it. Raises `EngineError` once the engine has stopped."""
        ...

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests; unknown and finished ids are passed over."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that are not finished."""
        ...

    def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Series by Prometheus name, without prefix."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing changed, while requests hold blocks."""
        ...

    def shutdown(self) -> None:
        """End the engine; may be called twice."""
        ...
