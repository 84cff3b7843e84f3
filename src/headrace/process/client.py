"""The engine in a process of its own, for a caller that waits: what `LLM(engine_process=True)` drives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import zmq

from headrace.configuration import Started
from headrace.core.errors import EngineError, error_of
from headrace.front_half import FrontHalf, build_front
from headrace.frontend import Prepared
from headrace.output.processor import OutputProcessor, ProcessedOutputs
from headrace.outputs import RequestUpdate
from headrace.process.core_process import CoreProcess
from headrace.process.messages import (
    Answer,
    Call,
    Codec,
    Died,
    Finish,
    Hello,
    Outputs,
    Ready,
    Shared,
    Submit,
    ToCore,
    ToFront,
)
from headrace.report import StartupReport

__all__ = ["ProcessClient"]


class ProcessClient:
    """Implements `EngineClient`. Raises what building the engine raises, in that process or in this one."""

    front: FrontHalf
    report: StartupReport

    def __init__(self, started: Started) -> None:
        self._codec = Codec(started.plugins.registry.stash_keys)
        self._process = CoreProcess(started)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._call_ids = itertools.count()
        self._is_open = True
        try:
            self._process.wait_ready()
            self._connect(started)
        except BaseException:
            self.shutdown()
            raise

    def _connect(self, started: Started) -> None:
        self._socket.set(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(self._process.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._process.child.status_fd, zmq.POLLIN)
        self._send(Hello())
        ready = self._receive()
        if not isinstance(ready, Ready):
            raise EngineError(f"the engine core answered {type(ready).__name__} where it had to answer Ready")
        self.report = ready.report
        self._shared = dict(ready.shared)
        self.front = build_front(started.config, started.plugins.registry, ready.facts, self._shared)
        self._outputs = OutputProcessor(self.front.tokenizer)

    def submit(self, request: Prepared) -> None:
        """Hand a request to the engine."""
        self._outputs.add(request.front)
        for part in request.engine:
            self._send(Submit(part))

    def step(self) -> list[RequestUpdate]:
        """Wait for something new, and return it. Raises `EngineError` once the engine has stopped."""
        message = self._receive()
        if not isinstance(message, Outputs):
            return []
        return self._taken(self._outputs.process(message.outputs))

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests; what the engine still says of them is dropped."""
        return self._taken(self._outputs.abort(request_ids))

    def _taken(self, processed: ProcessedOutputs) -> list[RequestUpdate]:
        for request_id, reason in processed.to_finish:
            if self._is_open:
                self._send(Finish([request_id], reason))
        return processed.updates

    @property
    def num_unfinished(self) -> int:
        """Requests that are not finished."""
        return self._outputs.num_unfinished

    def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`; outputs that arrive before the answer are kept in the requests."""
        call_id = next(self._call_ids)
        self._send(Call(call_id, plugin, method, list(args)))
        while True:
            message = self._receive()
            if isinstance(message, Outputs):
                self._taken(self._outputs.process(message.outputs))
            elif isinstance(message, Answer) and message.call_id == call_id:
                if message.error is not None:
                    raise error_of(message.error_kind, message.error)
                return message.value

    def metrics(self) -> dict[str, float]:
        """Series by Prometheus name, without prefix."""
        return dict(self.call("", "metrics"))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while requests hold blocks."""
        return bool(self.call("", "reset_prefix_cache"))

    def shutdown(self) -> None:
        """End the process; may be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._socket.close()
        self._context.term()
        self._process.stop()

    def _send(self, message: ToCore) -> None:
        self._socket.send(self._codec.encode(message))

    def _receive(self) -> ToFront:
        """Wait for a message. Raises `EngineError` where the engine stopped, with its cause."""
        if not self._is_open:
            raise EngineError("the engine was shut down")
        if self._socket not in dict(self._poller.poll()):
            raise EngineError(self._process.cause)
        message = self._codec.decode_to_front(self._socket.recv())
        if isinstance(message, Died):
            raise EngineError(message.error)
        if isinstance(message, Shared):
            self._shared[message.name] = message.value
        return message
