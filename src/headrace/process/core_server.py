"""The engine core behind a socket: one thread, one loop. Messages in, a step, outputs out to whoever asked.

The same loop runs in a process of its own and in a thread: only the socket's address differs.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable
from typing import Any

import zmq

from headrace.assembly import build_core
from headrace.configuration import Started
from headrace.core.engine import EngineCore, state_for_log
from headrace.core.errors import ConfigError, EngineError, HeadraceError, OverloadedError
from headrace.core.interfaces.checkpoint import Progress
from headrace.core.plan import EngineOutput
from headrace.process.messages import (
    Answer,
    Call,
    Codec,
    Died,
    Finish,
    Gone,
    Hello,
    Outputs,
    Ready,
    Shared,
    Submit,
    ToCore,
    ToFront,
)
from headrace.process.redaction import config_for_log
from headrace.process.wake import SocketWake

__all__ = ["CoreServer"]

logger = logging.getLogger("headrace.core")


class CoreServer:
    """Builds the core half and serves it to front ends.

    Parameters
    ----------
    context: of ZeroMQ; shared with the front end where both are in one process.
    address: where to bind a ROUTER socket. A front end connects a DEALER whose identity is its name.

    Raises as `build_core` does.
    """

    def __init__(
        self, started: Started, context: zmq.Context[Any], address: str, progress: Progress | None = None
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set_hwm(0)  # a bounded queue would drop tokens of a front end that is slow
        self._socket.bind(address)
        self._wake = SocketWake(self._socket)
        self._config = started.config
        self._shared: dict[str, Any] = {}
        self._news: queue.SimpleQueue[Shared] = queue.SimpleQueue()
        half = build_core(started, progress, wake=self._wake, share=self._share)
        self._core: EngineCore = half.core
        self._facts, self.report = half.facts, half.report
        self._codec = Codec(started.plugins.registry.stash_keys)
        self._fronts: set[bytes] = set()
        self._owners: dict[str, bytes] = {}
        """Unfinished requests: whose they are."""
        self._stopping = False

    def stop(self) -> None:
        """End the loop after the step under way; from any thread."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Serve until `stop`, or until the engine fails: front ends are told then, and `EngineError` is raised."""
        try:
            while not self._stopping:
                if not self._core.has_work:
                    self._wake.wait(None)
                    self._wake.clear()
                self._receive()
                self._tell_news()
                if self._core.has_work:
                    self._send_outputs(self._core.step())
        except Exception as error:
            # Whatever it was: who waits for answers hears the cause.
            stopped = (
                error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            )
            logger.critical(
                "stopped: %s\nconfiguration: %s\nstate: %s",
                stopped,
                config_for_log(self._config),
                state_for_log(self._core.snapshot()),
                exc_info=None if self._core.num_failed_steps else error,
            )
            self._broadcast(Died(str(stopped)))
            if stopped is error:
                raise
            raise stopped from error
        finally:
            self._core.shutdown()
            self._socket.close()
            self._wake.close()

    # In ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take every message that waits."""
        while True:
            try:
                front, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(front, self._codec.decode_to_core(data))

    def _handle(self, front: bytes, message: ToCore) -> None:
        if isinstance(message, Submit):
            self._owners[message.request.request_id] = front
            self._core.add(message.request)
        elif isinstance(message, Finish):
            self._core.finish(message.request_ids, message.reason)
        elif isinstance(message, Call):
            self._send(front, self._answer(message))
        elif isinstance(message, Hello):
            self._fronts.add(front)
            self._send(front, Ready(os.getpid(), self._facts, self.report, self._shared))
        elif isinstance(message, Gone):
            self._forget(message.front.encode())

    def _answer(self, call: Call) -> Answer:
        try:
            if call.plugin:
                return Answer(call.call_id, self._core.call(call.plugin, call.method, call.args))
            return Answer(call.call_id, self._engine_call(call))
        except HeadraceError as error:
            return Answer(call.call_id, error=str(error), error_kind=error.kind)
        except Exception as error:  # noqa: BLE001 - isolation point: a plugin's call; who asked gets the error
            text = f"{call.plugin}.{call.method} raised {type(error).__name__}: {error}"
            return Answer(call.call_id, error=text, error_kind="plugin")

    def _engine_call(self, call: Call) -> Any:
        scheduler = self._core.scheduler
        functions: dict[str, Callable[..., Any]] = {
            "metrics": lambda: dict(self._core.metrics()),
            "snapshot": self._core.snapshot,
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "refuse_waiting": self._refuse_waiting,
            "pause": scheduler.pause,
            "resume": scheduler.resume,
        }
        if call.method not in functions:
            raise ConfigError(f"the engine has no call {call.method!r}; there are: {', '.join(functions)}")
        return functions[call.method](*call.args)

    def _refuse_waiting(self, why: str) -> int:
        """End every request that has not begun; returns how many there were."""
        state = self._core.snapshot()
        names = [
            one["request_id"]
            for one in [*state["waiting"], *state["parked"]]
            if not one["computed"] and not one["preemptions"]
        ]
        self._core.finish(names, "error", OverloadedError(why))
        return len(names)

    def _forget(self, front: bytes) -> None:
        """A front end is gone, with all connections it had (`NAME.1`, `NAME.2`): nobody waits for its requests."""
        gone = {known for known in self._fronts if known.rpartition(b".")[0] == front}
        self._fronts -= gone
        names = [name for name, owner in self._owners.items() if owner in gone]
        self._core.finish(names, "abort")

    # Out ---------------------------------------------------------------------------------------------

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        by_front: dict[bytes, list[EngineOutput]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            by_front.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for front, some in by_front.items():
            self._send(front, Outputs(some))

    def _share(self, name: str, value: Any) -> None:
        self._news.put(Shared(name, value))
        self._wake.set()

    def _tell_news(self) -> None:
        while not self._news.empty():
            news = self._news.get()
            self._shared[news.name] = news.value
            self._broadcast(news)

    def _broadcast(self, message: ToFront) -> None:
        for front in self._fronts:
            self._send(front, message)

    def _send(self, front: bytes, message: ToFront) -> None:
        self._socket.send_multipart([front, self._codec.encode(message)])
