"""All engine listeners, told as one; what one of them raises is kept for the engine to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.core.errors import PluginCallError
from headrace.core.interfaces.scheduling import EngineListener
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request

__all__ = ["Listeners"]


class Listeners(EngineListener):
    """Tells each listener in order and never raises, so that a listener cannot leave the books half written.

    The engine asks `take_error` after each step and fails that step's requests, by plugin name.
    """

    name = "listeners"

    def __init__(self, listeners: Sequence[EngineListener] = ()) -> None:
        self._listeners = tuple(listeners)
        self._error: PluginCallError | None = None

    def take_error(self) -> PluginCallError | None:
        """Return the first failure since the last call, and forget it."""
        error, self._error = self._error, None
        return error

    def on_add(self, request: Request) -> None:
        """A request was queued."""
        self._tell("on_add", lambda listener: listener.on_add(request))

    def on_plan(self, plan: StepPlan) -> None:
        """A plan is about to be sent."""
        self._tell("on_plan", lambda listener: listener.on_plan(plan))

    def on_preempt(self, request: Request) -> None:
        """A running request lost its blocks."""
        self._tell("on_preempt", lambda listener: listener.on_preempt(request))

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """A result arrived, before it is taken in."""
        self._tell("on_result", lambda listener: listener.on_result(plan, result))

    def on_finish(self, request: Request) -> None:
        """A request ended."""
        self._tell("on_finish", lambda listener: listener.on_finish(request))

    def metrics(self) -> Mapping[str, float]:
        """Figures of all listeners."""
        merged: dict[str, float] = {}
        for listener in self._listeners:
            merged.update(listener.metrics())
        return merged

    def close(self) -> None:
        """The engine ends."""
        self._tell("close", lambda listener: listener.close())

    def _tell(self, method: str, call: Callable[[EngineListener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception as error:  # noqa: BLE001 - isolation point: a plugin's call, judged by the engine
                failure = PluginCallError(
                    f"engine listener {listener.name!r} failed in {method}: {type(error).__name__}: {error}",
                    plugin=listener.name,
                )
                failure.__cause__ = error
                self._error = self._error or failure
