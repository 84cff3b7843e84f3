"""`AsyncLLM`: an engine for programs with an event loop, such as servers. Requests come and go at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq

from headrace.beams import BeamRequest, BeamSearchParams
from headrace.chat_template import ChatTemplate, Source, make_chat_template
from headrace.configuration import Started, start_configuration
from headrace.core.config import EngineConfig
from headrace.core.errors import EngineError
from headrace.core.plan import EngineOutput
from headrace.core.plugin.registry import Registry
from headrace.core.sampling_params import SamplingParams
from headrace.front_half import FrontHalf, build_front
from headrace.frontend import FrontEnd, Prepared
from headrace.output.processor import OutputProcessor, ProcessedOutputs
from headrace.outputs import RequestOutput, RequestUpdate
from headrace.process.connection import CoreConnection
from headrace.process.hosts import EngineHost, host_engine
from headrace.process.messages import Codec
from headrace.report import StartupReport

__all__ = ["AsyncLLM", "RequestStream"]

T = TypeVar("T")

LONG_PROMPT = 2048
"""Characters, ids or messages from which on a prompt is made on a thread, so that other streams go on meanwhile."""


class AsyncLLM:
    """Answers requests that come at any time; made by `start`, and by servers by `connect`.

        llm = await AsyncLLM.start("smollm2")
        async for output in llm.generate("The river", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Used on one event loop. A request ends when its iterator is closed.
    """

    def __init__(self, started: Started, *, name: str = "front", chat_template: Source | None = None) -> None:
        self._started = started
        self._name = name
        self._given_template = chat_template
        self._host: EngineHost | None = None
        self._connection: CoreConnection | None = None
        self._parts: _Parts | None = None
        self._shared: dict[str, Any] = {}
        self._streams: dict[str, RequestStream] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._num_connections = 0
        self._context: zmq.Context[Any] = zmq.Context()

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        chat_template: Source | None = None,
        **options: Any,
    ) -> AsyncLLM:
        """Start an engine; parameters as those of `LLM`.

        The loop runs in a process of its own, with `engine_process=False` on a thread of this one. Raises as `LLM`
        does.
        """
        return await cls.from_started(
            start_configuration(model, file=config, keywords=options), chat_template=chat_template
        )

    @classmethod
    async def from_started(cls, started: Started, *, chat_template: Source | None = None) -> AsyncLLM:
        """Start an engine from a configuration that is validated already."""
        llm = cls(started, chat_template=chat_template)
        llm._host = await host_engine(started, llm._context)
        try:
            await llm.connect(llm._host.address)
        except BaseException:
            await llm.shutdown()
            raise
        llm._host.watch(llm.lose)
        return llm

    async def connect(self, address: str) -> None:
        """Connect to an engine core, and wait until it answers; again to the one that took its place.

        Raises `EngineError` where it is gone before that.
        """
        # Until it answers nothing is taken in: a request would be noted with the parts that are about to go.
        self._parts = None
        if self._connection is not None:
            await self._connection.close()
        self._num_connections += 1
        registry = self.registry
        self._connection = CoreConnection(
            self._context,
            address,
            f"{self._name}.{self._num_connections}",
            Codec(registry.stash_keys),
            on_outputs=self._take,
            on_lost=self.fail_all,
            shared=self._shared,
        )
        ready = await self._connection.hello()
        front = build_front(self._started.config, registry, ready.facts, self._shared)
        self._parts = _Parts(
            front,
            FrontEnd(front, prefix=f"{self._name}.{self._num_connections}"),
            OutputProcessor(front.tokenizer),
            make_chat_template(front, self._given_template),
            ready.report,
            ready.pid,
        )

    # What there is -----------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """The parts that its plugins registered."""
        return self._started.plugins.registry

    @property
    def front(self) -> FrontHalf:
        """Tokenizer, limits and what else requests are made with. Raises `EngineError` before an engine was there."""
        return self._there().front

    @property
    def report(self) -> StartupReport:
        """What was started: model, memory, backend, options."""
        return self._there().report

    @property
    def engine_pid(self) -> int | None:
        """Process of the engine core, the last one there was; None: there was none yet."""
        return None if self._parts is None else self._parts.pid

    @property
    def config(self) -> EngineConfig:
        """What the engine is started with."""
        return self._started.config

    @property
    def lost(self) -> EngineError | None:
        """Why the engine is gone or not there yet; None: it answers."""
        if self._parts is None or self._connection is None:
            return EngineError("the engine is still starting")
        return self._connection.lost

    @property
    def num_unfinished(self) -> int:
        """Requests that are not finished."""
        return len(self._streams)

    def _there(self) -> _Parts:
        if self._parts is None:
            raise EngineError("the engine is still starting")
        return self._parts

    # Requests ----------------------------------------------------------------------------------------

    async def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        is_chat: bool = False,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Prepared:
        """Check and tokenize; a long prompt on a thread. Raises `RequestError`, and nothing was sent then."""
        front = self._there().frontend
        names: dict[str, Any] = {"is_chat": is_chat, "request_id": request_id, "priority": priority}
        return await self._make(prompt, lambda: front.prepare(prompt, params, **names))

    async def prepare_beams(self, prompt: Any, params: BeamSearchParams, **names: Any) -> BeamRequest:
        """Check and tokenize for a beam search, which the caller then runs step by step; otherwise as `prepare`."""
        parts = self._there()
        return await self._make(
            prompt, lambda: BeamRequest(parts.frontend, parts.front, prompt, params, **names)
        )

    async def _make(self, prompt: Any, make: Callable[[], T]) -> T:
        """Call `make`, on a thread where the prompt is long."""
        if _size(prompt) < LONG_PROMPT:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._pool, make)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> str:
        """Return a conversation's prompt; a long one is made on a thread. Raises `RequestError`."""
        template = self._there().template
        if (
            sum(_size(message.get("content")) for message in messages if isinstance(message, Mapping))
            < LONG_PROMPT
        ):
            return template.render(messages, **template_options)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: template.render(messages, **template_options)
        )

    async def run(self, request: Prepared) -> AsyncIterator[RequestUpdate]:
        """Submit a request and yield what is new until it is finished; closing the iterator aborts it.

        Raises `RequestError` if its id is in use, and `EngineError` where the engine is gone, or goes meanwhile.
        """
        stream = self.submit(request)
        try:
            while True:
                for update in await stream.take():
                    yield update
                if stream.is_over:
                    return
        finally:
            self.abort([request.front.request_id])

    def submit(self, request: Prepared, stream: RequestStream | None = None) -> RequestStream:
        """Hand a request to the engine; its updates come by the stream. `abort` must follow where it is left.

        stream: one that others of the caller's requests come by already.
        """
        parts, connection = self._there(), self._connection
        assert connection is not None
        if connection.lost is not None:
            raise connection.lost
        parts.outputs.add(request.front)
        stream = self._streams[request.front.request_id] = stream or RequestStream()
        stream.open()
        connection.submit(request.engine)
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their streams say so. Unknown and finished ids are passed over."""
        if self._parts is None or self._connection is None:
            return
        processed = self._parts.outputs.abort(name for name in request_ids if name in self._streams)
        self._hand_on(processed)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt, in any form that `LLM.generate` takes, and yield its output as it grows."""
        request = await self.prepare(prompt, sampling_params or SamplingParams(), priority=priority)
        async for update in self.run(request):
            yield update.output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, and yield the output as it grows."""
        text = await self.render_chat(messages, **template_options)
        params = sampling_params or SamplingParams(max_tokens=None)
        request = await self.prepare(text, params, is_chat=True)
        async for update in self.run(request):
            yield update.output

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        assert self._parts is not None
        self._hand_on(self._parts.outputs.process(outputs))

    def _hand_on(self, processed: ProcessedOutputs) -> None:
        assert self._connection is not None
        for request_id, reason in processed.to_finish:
            self._connection.finish(request_id, reason)
        for update in processed.updates:
            name = update.output.request_id
            stream = self._streams[name]
            if update.output.finished:
                del self._streams[name]
            stream.put(update)

    def fail_all(self, error: EngineError) -> None:
        """End every open request; whoever waits for one gets the error."""
        streams = dict(self._streams)
        self.abort(streams)
        for stream in streams.values():
            stream.fail(error)

    # The rest ----------------------------------------------------------------------------------------

    def lose(self, error: EngineError) -> None:
        """The engine's process is gone, says who watches it: every open request fails with the cause."""
        if self._connection is not None:
            self._connection.lose(error)

    async def call(self, plugin: str, method: str, *args: Any) -> Any:
        """See `EngineCore.call`."""
        self._there()
        assert self._connection is not None
        return await self._connection.call(plugin, method, *args)

    async def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name, without prefix."""
        return dict(await self.call("", "metrics"))

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing changed, while requests hold blocks."""
        return bool(await self.call("", "reset_prefix_cache"))

    async def shutdown(self) -> None:
        """End open requests, and the engine where this object started it; may be called twice."""
        self._pool.shutdown(wait=False)
        if self._connection is not None:
            self.fail_all(EngineError("the engine was shut down"))
            await self._connection.close()
        host, self._host = self._host, None
        if host is not None:
            await host.stop()
        self._context.destroy(linger=0)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


@dataclass(frozen=True)
class _Parts:
    """What is known once an engine answered."""

    front: FrontHalf
    frontend: FrontEnd
    outputs: OutputProcessor
    template: ChatTemplate
    report: StartupReport
    pid: int


class RequestStream:
    """What is new of one request or several, until all are finished. Made by `AsyncLLM.submit`."""

    def __init__(self) -> None:
        self._updates: list[RequestUpdate] = []
        self._error: EngineError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._num_open = 0
        self.is_over = False
        """Nothing more will come beyond what `take` returned."""

    def open(self) -> None:
        """One more request comes by it."""
        self._num_open += 1

    def put(self, update: RequestUpdate) -> None:
        """A request got further."""
        self._updates.append(update)
        self._num_open -= update.output.finished
        self._wake()

    def fail(self, error: EngineError) -> None:
        """The engine is gone, or this request was given up: what was not taken yet is dropped."""
        self._updates.clear()
        self._error = error
        self._wake()

    async def take(self) -> list[RequestUpdate]:
        """Wait for something new and return all of it. Raises `EngineError` where the engine is gone."""
        while not self._updates:
            if self._error is not None:
                self.is_over = True
                raise self._error
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        updates, self._updates = self._updates, []
        self.is_over = not self._num_open
        return updates

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _size(prompt: Any) -> int:
    """Return about how much work a prompt is: its characters, ids or parts."""
    if isinstance(prompt, Mapping):
        return sum(_size(value) for value in prompt.values())
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return sum(_size(part) for part in prompt)
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
