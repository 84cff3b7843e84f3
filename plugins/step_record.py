"""Keeps a record of every step: who ran, who waits and why, blocks, who was preempted and who ended.

`step_log` (flag `--step-log FILE`) appends a JSON object a line to a file. In developer mode the last
`step_record_size` records are kept in memory and answered by `GET /debug/steps?limit=N`. Nothing is recorded where
neither is asked for. Requests appear by id and by counts; no text and no token of theirs is written anywhere.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import PositiveInt

from headrace.core.config import EngineConfig, Section, option
from headrace.core.errors import ConfigError
from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext, HttpContext
from headrace.core.plan import Continued, NewRequest, StepPlan, StepResult
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar
from headrace.core.request import Request

__all__ = [
    "NoStepRecord",
    "StepLog",
    "StepRecord",
    "StepRecordSection",
    "add_routes",
    "headrace_api",
    "headrace_register",
    "make_step_record",
    "name",
]

name = "step_record"
headrace_api = ">=1,<2"

logger = logging.getLogger("headrace.step_record")


class StepRecordSection(Section):
    """What is recorded of steps."""

    log: str | None = option(None, "File to append a JSON line a step to.", flat="step_log")
    size: int = option(
        256, "Steps kept in memory in developer mode, for /debug/steps.", flat="step_record_size", ge=1
    )


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the section, the listener and the route."""
    registrar.config_section(name, StepRecordSection)
    registrar.engine_listener(name, make_step_record)
    registrar.http_route(name, add_routes)


def make_step_record(context: CoreContext) -> EngineListener:
    """Return the recorder, or where nobody asked for one a listener that does not listen.

    Raises `ConfigError` where the file cannot be written.
    """
    section = context.config.section(name, StepRecordSection)
    if section.log is None and not _in_dev_mode(context.config):
        return NoStepRecord()
    log = None if section.log is None else StepLog(Path(section.log))
    return StepRecord(context.snapshot, section.size, log)


def _in_dev_mode(config: EngineConfig) -> bool:
    """The section is the server's, whose class this plugin does not know."""
    return bool(getattr(config.sections.get("server"), "dev_mode", False))


def add_routes(context: HttpContext) -> None:
    """Add `GET /debug/steps` in developer mode."""
    if not _in_dev_mode(context.config):
        return

    async def steps(limit: PositiveInt = 64) -> dict[str, Any]:
        """The last steps, oldest first: who ran, who waits and why."""
        return {"steps": await context.engine.call(name, "recent", limit)}

    context.app.get("/debug/steps", tags=["development"])(steps)


class NoStepRecord(EngineListener):
    """Hears nothing."""

    name = name

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """Raise `ConfigError`: there is no record."""
        raise ConfigError(
            "steps are not recorded; start with step_log (a file) or in developer mode", option="step_log"
        )


class StepLog:
    """A file with a record a line. Raises `ConfigError` where it cannot be written.

    What goes wrong later must not stop the engine: it is logged once, and the file is left alone from then on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            try:
                # A full disk shows only when something is written. A blank before a line's first brace is still JSON.
                self._file.write(b" ")
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"step_log: {path} cannot be written: {error.strerror or error}; choose another file",
                option="step_log",
            ) from error

    def write(self, line: bytes) -> None:
        """Append a line, unless writing failed before."""
        if self._file.closed:
            return
        try:
            if self._file.write(line + b"\n") == len(line) + 1:
                return
            why = "the disk is full"
        except OSError as error:
            why = error.strerror or str(error)
        self.close()
        logger.error(
            "step_log: %s cannot be written any more: %s; steps are not logged from here on", self._path, why
        )

    def close(self) -> None:
        """Write no more."""
        self._file.close()


class StepRecord(EngineListener):
    """Writes down each step when its result is there.

    A record holds counts of who runs and waits as they were when the step was planned, and who was preempted and who
    ended since the plan before it. A step that failed has no duration; it is written when the next one is done, or
    when the engine ends.

    snapshot: see `CoreContext.snapshot`.
    size: records kept in memory.
    """

    name = name

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        size: int,
        log: StepLog | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._log = log
        self._lines: deque[bytes] = deque(maxlen=size)
        self._sent: dict[int, tuple[float, dict[str, Any]]] = {}
        """Steps whose results are not there, oldest first: when they were sent, and what is known of them."""
        self._preempted: list[str] = []
        self._finished: list[dict[str, str | None]] = []

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """Return the last `limit` records, oldest first; called by front ends."""
        if limit < 1:
            raise ConfigError(f"limit: must be at least 1, got {limit}")
        return [msgspec.json.decode(line) for line in list(self._lines)[-limit:]]

    def on_preempt(self, request: Request) -> None:
        """Note it for the plan that is being made."""
        self._preempted.append(request.request_id)

    def on_finish(self, request: Request) -> None:
        """Note it for the next plan."""
        self._finished.append({"id": request.request_id, "reason": request.finish_reason})

    def on_plan(self, plan: StepPlan) -> None:
        """Begin a record."""
        state = self._snapshot()
        blocks = state["kv_blocks"]
        preempted, self._preempted = self._preempted, []
        finished, self._finished = self._finished, []
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        record = {
            "step": plan.step,
            "time": time.time(),
            "duration": None,
            "failed": True,
            "num_tokens": plan.num_tokens,
            "requests": [
                {
                    "id": entry.request_id,
                    "new": isinstance(entry, NewRequest),
                    "start": entry.start,
                    "count": entry.count,
                    "sampled": 0,
                }
                for entry in entries
            ],
            "preempted": preempted,
            "finished": finished,
            "running": len(state["running"]),
            "waiting": len(state["waiting"]),
            "parked": dict(Counter(str(one["reason"]) for one in state["parked"])),
            "blocks": {"free": blocks["free"], "held": blocks["total"] - blocks["free"]},
        }
        self._sent[plan.step] = (time.perf_counter(), record)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """End the record, and those of steps before that never had a result."""
        for step in [step for step in self._sent if step <= plan.step]:
            sent, record = self._sent.pop(step)
            if step == plan.step:
                record["duration"] = time.perf_counter() - sent
                record["failed"] = False
                for entry in record["requests"]:
                    entry["sampled"] = len(result.requests[entry["id"]].tokens)
            self._write(record)

    def close(self) -> None:
        """Write what never had a result, and close the file."""
        for _, record in self._sent.values():
            self._write(record)
        self._sent.clear()
        if self._log is not None:
            self._log.close()

    def _write(self, record: dict[str, Any]) -> None:
        line = msgspec.json.encode(record)
        self._lines.append(line)
        if self._log is not None:
            self._log.write(line)
