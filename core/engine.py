"""The engine loop: requests in, plans out to the executor, results in, outputs out.

Single-threaded. Whoever owns the loop calls `step` (in-process: `LLM`); other threads only put things into the
inbox and call `wake`. Core sees an inbox and an outbox; sockets live in the front door.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from headrace.core.errors import ConfigError, EngineError, HeadraceError, PluginCallError
from headrace.core.interfaces.executor import Executor, StepHandle
from headrace.core.interfaces.scheduling import Scheduler
from headrace.core.listeners import Listeners
from headrace.core.plan import EngineOutput, StepPlan, StepResult
from headrace.core.request import EngineRequest, FinishReason

__all__ = ["EngineCore", "Wake", "state_for_log"]

logger = logging.getLogger("headrace.core")

PARKED_POLL_SECONDS = 0.05
"""How often parked requests are asked about when nobody calls `wake`."""

STALL_SECONDS = 3.0
"""How long a scheduler may have work, plan nothing and have nobody parked before that is called a fault."""

MAX_FAILED_STEPS = 3
"""So many failed steps in a row stop the engine."""

MAX_LOGGED_REQUESTS = 64
"""How many requests of a kind a log says something of each."""


class Wake(Protocol):
    """What the loop sleeps on; a `threading.Event` is one."""

    def set(self) -> None:
        """Wake the loop; from any thread."""
        ...

    def wait(self, timeout: float) -> bool:
        """Sleep until woken, at most `timeout` seconds."""
        ...

    def clear(self) -> None:
        """Forget that it was woken."""
        ...


class EngineCore:
    """Runs a scheduler against an executor.

    A step that raises fails its requests and no others; three in a row stop the engine: every request ends with the
    cause, and so does every later call.

    parts: plugin name → its parts in this room, which `call` reaches.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        listeners: Listeners | None = None,
        wake: Wake | None = None,
        parts: Mapping[str, Sequence[object]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._listeners = listeners or Listeners()
        self._inbox: queue.SimpleQueue[Callable[[], list[EngineOutput]]] = queue.SimpleQueue()
        self._in_flight: deque[tuple[StepPlan, StepHandle, PluginCallError | None]] = deque()
        self._wake: Wake = wake or threading.Event()
        self._parts = dict(parts or {})
        self._failed_steps = 0
        self._stalled_since: float | None = None
        self._checked_idle = False
        self._dead: EngineError | None = None

    # Inbox: any thread -------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it is judged when the loop takes it, and a refusal comes as an output."""
        self._put(lambda: self._take_request(request))

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, error: HeadraceError | None = None
    ) -> None:
        """Ask the loop to end requests; ids it does not know are passed over."""
        names = list(request_ids)
        self._put(lambda: self.scheduler.finish(names, reason, error))

    def wake(self) -> None:
        """Something a parked request waits for may have happened."""
        self._wake.set()

    def _put(self, action: Callable[[], list[EngineOutput]]) -> None:
        self._inbox.put(action)
        self._wake.set()

    # The loop: its owner's thread --------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(not self._inbox.empty() or self._in_flight or self.scheduler.has_work)

    @property
    def num_failed_steps(self) -> int:
        """How many of the last steps failed in a row; the log has the cause of each."""
        return self._failed_steps

    def step(self) -> list[EngineOutput]:
        """Take in what arrived, fill the executor, and take the oldest result; returns what there is to say.

        Raises `EngineError` once the engine has stopped.
        """
        if self._dead is not None:
            raise self._dead
        try:
            return self._step()
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - the loop's edge: its books may be half written, whatever it was
            self._die(f"the engine failed: {_text(error)}", error)

    def _step(self) -> list[EngineOutput]:
        outputs = self._drain()
        self._fill(outputs)
        if self._in_flight:
            outputs += self._take_result()
            self._stalled_since = None
        elif not outputs and self.scheduler.has_work:
            self._wait()
        if not self.has_work:
            self._check_when_idle()
        return outputs

    def _drain(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return outputs
            self._checked_idle = False
            outputs += action()

    def _take_request(self, request: EngineRequest) -> list[EngineOutput]:
        try:
            self.scheduler.add(request)
        except HeadraceError as error:
            return [
                EngineOutput(
                    request_id=request.request_id,
                    finish_reason="error",
                    error=str(error),
                    error_kind=error.kind,
                )
            ]
        return []

    def _fill(self, outputs: list[EngineOutput]) -> None:
        """Send plans until the executor has as many as it takes, or there is nothing to plan."""
        while len(self._in_flight) < self.executor.max_in_flight:
            plan = self._schedule()
            outputs += self.scheduler.take_failures()
            if plan.is_empty:
                return
            self._listeners.on_plan(plan)
            try:
                handle = self.executor.submit(plan)
            except Exception as error:  # noqa: BLE001 - isolation point: a step's call
                outputs += self._fail_step(plan, error)
                return
            # A listener that failed fails the step, but workers must hear what the plan says all the same.
            self._in_flight.append((plan, handle, self._listeners.take_error()))

    def _schedule(self) -> StepPlan:
        """Ask for a plan; a scheduler or policy that breaks its contract stops the engine."""
        try:
            plan = self.scheduler.schedule()
            _check_plan(plan)
        except HeadraceError as error:
            self._die(f"no step can be planned: {error}", error)
        return plan

    def _take_result(self) -> list[EngineOutput]:
        plan, handle, error = self._in_flight.popleft()
        try:
            result = handle.result()
        except KeyboardInterrupt:
            self._recover()
            raise
        except Exception as failure:  # noqa: BLE001 - isolation point: a step's call; its requests fail
            outputs = self._fail_step(plan, failure)
            self._recover()
            return outputs
        if error is None:
            self._listeners.on_result(plan, result)
            error = self._listeners.take_error()
        if error is not None:
            return self._fail_step(plan, error)
        outputs = self._update(plan, result)
        error = self._listeners.take_error()
        if error is not None:
            return outputs + self._fail_step(plan, error)
        self._failed_steps = 0
        return outputs

    def _recover(self) -> None:
        """A step broke off in the middle: nobody knows what workers still know, so what runs starts again."""
        self._in_flight.clear()
        self.executor.call("reset")
        self.scheduler.restart()

    def _update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        if result.step != plan.step:
            raise EngineError(f"the executor answered step {result.step} when step {plan.step} was due")
        return self.scheduler.update(plan, result)

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[EngineOutput]:
        self._failed_steps += 1
        text = _text(error)
        logger.error(
            "step %d failed: %s\nplan: %s\nstate: %s",
            plan.step,
            text,
            plan,
            state_for_log(self.snapshot()),
            exc_info=error,
        )
        outputs = self.scheduler.fail_plan(plan, f"step {plan.step} failed: {text}")
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._die(f"the engine stopped after {self._failed_steps} failed steps: {text}", error)
        return outputs

    def _die(self, text: str, cause: Exception | None = None) -> NoReturn:
        self._dead = EngineError(text)
        raise self._dead from cause

    def _wait(self) -> None:
        """Nothing can run: sleep until woken, or find that nothing ever will."""
        if not self.scheduler.num_parked and not self.scheduler.is_paused:
            now = time.monotonic()
            self._stalled_since = self._stalled_since or now
            if now - self._stalled_since > STALL_SECONDS:
                name = type(self.scheduler).__name__
                self._die(
                    f"scheduler {name} has work, planned nothing for {STALL_SECONDS:g} s and has nobody parked: "
                    f"{self.scheduler.snapshot()}"
                )
        self._wake.wait(PARKED_POLL_SECONDS)
        self._wake.clear()

    def _check_when_idle(self) -> None:
        if not self._checked_idle:
            self._checked_idle = True
            self.scheduler.check_integrity()

    # The rest ----------------------------------------------------------------------------------------

    def call(self, plugin: str, method: str, args: Sequence[Any] = ()) -> Any:
        """Call a method of a plugin's part in this room, or else of its halves in the workers (a list, one each).

        On the loop's thread, after the plans already sent; such a method must not block. Methods whose names begin
        with an underscore are no part of what may be called. Raises `ConfigError` where there is no such method, and
        what the method raises.
        """
        if method.startswith("_"):
            raise ConfigError(f"method {method!r} of plugin {plugin!r} is not for calling from outside")
        for part in self._parts.get(plugin, ()):
            function = getattr(part, method, None)
            if callable(function):
                return function(*args)
        return self.executor.call_plugin(plugin, method, *args)

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters of scheduler, executor and listeners, by Prometheus name."""
        return {**self.executor.metrics(), **self.scheduler.metrics(), **self._listeners.metrics()}

    def snapshot(self) -> dict[str, Any]:
        """The scheduler's state in plain values, and the plans in flight."""
        return {**self.scheduler.snapshot(), "in_flight": [plan.step for plan, _, _ in self._in_flight]}

    def shutdown(self) -> None:
        """End listeners and executor; may be called twice."""
        self._in_flight.clear()
        self._listeners.close()
        self.executor.shutdown()


def state_for_log(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot that fits a log: of long lists the first entries, and how many follow."""
    told: dict[str, Any] = {}
    for name, value in state.items():
        told[name] = value
        if isinstance(value, list) and len(value) > MAX_LOGGED_REQUESTS:
            rest = len(value) - MAX_LOGGED_REQUESTS
            told[name] = [*value[:MAX_LOGGED_REQUESTS], f"and {rest} more"]
    return told


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


def _check_plan(plan: StepPlan) -> None:
    """A scheduler is a plugin: a request planned twice in a step would corrupt its KV."""
    names = [entry.request_id for entry in plan.new] + [entry.request_id for entry in plan.continued]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EngineError(f"the scheduler planned request {twice!r} twice in step {plan.step}")
