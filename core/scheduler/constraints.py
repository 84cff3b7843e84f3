"""All constraints of an engine, asked as one, with their failures kept to the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import HeadraceError, PluginCallError
from headrace.core.interfaces.scheduling import Constraint, Wait
from headrace.core.plan import StepPlan
from headrace.core.request import Request

__all__ = ["Constraints"]


class Constraints:
    """Calls each constraint in order. What one raises for a request comes out as it is,
    or as `PluginCallError` naming the constraint; either ends that request alone."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = tuple(constraints)
        # Asked for every request of every step: those that have nothing to say are left out.
        self._limiting = tuple(each for each in constraints if type(each).limit is not Constraint.limit)
        self._committing = tuple(each for each in constraints if type(each).commit is not Constraint.commit)

    def __bool__(self) -> bool:
        """Whether there is anybody to ask for a limit."""
        return bool(self._limiting)

    def begin(self, plan: StepPlan) -> None:
        """Tell all that a step is planned; a failure here is the step's."""
        self._tell(self._constraints, "begin", plan)

    def on_add(self, request: Request) -> None:
        """Tell all of a new request."""
        for index, constraint in enumerate(self._constraints):
            try:
                constraint.on_add(request)
            except Exception as error:
                for told in self._constraints[:index]:
                    told.on_finish(request)
                if isinstance(error, HeadraceError):
                    raise
                raise _named(constraint, "on_add", error) from error

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        """Return the lowest of all answers, or the first `Wait`."""
        for constraint in self._limiting:
            try:
                answer = constraint.limit(request, start, count)
            except HeadraceError:
                raise
            except Exception as error:
                raise _named(constraint, "limit", error) from error
            if isinstance(answer, Wait):
                return answer
            if not 0 <= answer <= count:
                raise PluginCallError(
                    f"constraint {constraint.name!r} allowed {answer} tokens; it may allow 0 to {count}",
                    plugin=constraint.name,
                )
            count = answer
        return count

    def commit(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Tell all that the tokens are in the plan."""
        self._tell(self._committing, "commit", request, start, count, plan)

    def revoke(self, request: Request, plan: StepPlan) -> None:
        """Tell all that the tokens left the plan again."""
        self._tell(self._constraints, "revoke", request, plan)

    def on_finish(self, request: Request) -> None:
        """Tell all that the request is gone."""
        self._tell(self._constraints, "on_finish", request)

    def metrics(self) -> Mapping[str, float]:
        """Figures of all constraints."""
        return {name: value for each in self._constraints for name, value in each.metrics().items()}

    def _tell(self, constraints: Sequence[Constraint], method: str, *args: Any) -> None:
        for constraint in constraints:
            try:
                getattr(constraint, method)(*args)
            except HeadraceError:
                raise
            except (
                Exception
            ) as error:  # isolation point: a plugin's call, which must not fail without its name
                raise _named(constraint, method, error) from error


def _named(constraint: Constraint, method: str, error: Exception) -> PluginCallError:
    return PluginCallError(
        f"constraint {constraint.name!r} failed in {method}: {type(error).__name__}: {error}",
        plugin=constraint.name,
    )
