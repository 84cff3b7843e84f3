"""A front end's connection to an engine core, for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from headrace.core.errors import EngineError, HeadraceError, error_of
from headrace.core.plan import EngineOutput
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

__all__ = ["CoreConnection"]


class CoreConnection:
    """Sends what it is told and hands on what comes. Used on one event loop.

    Parameters
    ----------
    name: of this front end; each of an engine has another.
    on_outputs: called with each step's outputs.
    on_lost: called once, with the cause, when the engine is gone; nothing comes after it.
    shared: kept up to date with what plugins keep for all front ends.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        name: str,
        codec: Codec,
        *,
        on_outputs: Callable[[Sequence[EngineOutput]], None],
        on_lost: Callable[[EngineError], None],
        shared: dict[str, Any],
    ) -> None:
        self._codec = codec
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._shared = shared
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._lost: EngineError | None = None
        self._socket = zmq.asyncio.Socket(context, zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name.encode())
        self._socket.set(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name="engine-core-reader")

    @property
    def lost(self) -> EngineError | None:
        """Why the engine is gone; None: it is there."""
        return self._lost

    async def hello(self) -> Ready:
        """Say that this front end is there and wait for the engine. Raises `EngineError` if it never comes."""
        self._send(Hello())
        return await self._ready

    def submit(self, requests: Sequence[Any]) -> None:
        """Send requests. Raises `EngineError` where the engine is gone."""
        self._check()
        for request in requests:
            self._send(Submit(request))

    def finish(self, request_id: str, reason: str) -> None:
        """End a request; one that the engine does not know, or an engine that is gone, is passed over."""
        if self._lost is None:
            self._send(Finish([request_id], reason))

    async def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`. Raises what the method raised, by kind; `EngineError` where the engine is gone."""
        self._check()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(call_id, plugin, method, list(args)))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def lose(self, error: EngineError) -> None:
        """The engine is gone, says who watched its process, or the engine itself."""
        if self._lost is not None:
            return
        self._lost = error
        self._reader.cancel()
        self._socket.close()
        for waiting in [self._ready, *self._calls.values()]:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # who does not wait for it any more must not be told at exit
        self._on_lost(error)

    async def close(self) -> None:
        """Let go of the socket."""
        self._lost = self._lost or EngineError("this front end was shut down")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _send(self, message: ToCore) -> None:
        self._socket.send(self._codec.encode(message))  # done at once: the queue has no limit

    async def _read(self) -> None:
        try:
            while self._lost is None:
                data = await self._socket.recv()
                self._take(self._codec.decode_to_front(data))
        except HeadraceError as error:
            self.lose(EngineError(f"what the engine core said could not be read: {error}"))

    def _take(self, message: ToFront) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message.outputs)
        elif isinstance(message, Answer):
            waiting = self._calls.get(message.call_id)
            if waiting is None or waiting.done():
                return
            if message.error is None:
                waiting.set_result(message.value)
            else:
                waiting.set_exception(error_of(message.error_kind, message.error))
        elif isinstance(message, Shared):
            self._shared[message.name] = message.value
        elif isinstance(message, Ready):
            self._shared.update(message.shared)
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Died):
            self.lose(EngineError(message.error))
