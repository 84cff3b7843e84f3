"""One request to a compute route over HTTP: read, checked, run and answered, while its client is watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.errors import HeadraceError
from headrace.outputs import RequestUpdate
from headrace.server.bodies import read_json
from headrace.server.compute import ComputeRoutes, Job
from headrace.server.errors import ApiError, api_error, failure_of
from headrace.server.fields import ignored_header
from headrace.server.formats import DONE, error_event
from headrace.server.options import ServerSection
from headrace.server.request_log import log_request
from headrace.server.runs import Run

__all__ = ["Exchange"]

logger = logging.getLogger(__name__)

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Exchange(Response):
    """Answers one request to a compute route, whole or as a stream of events.

    Its body is read here and not by the framework: within a limit, and after it is known that there is an engine.
    Raises `ApiError` and `HeadraceError` as long as nothing was sent; a stream that has begun ends with an event
    that says what is wrong.
    """

    def __init__(self, compute: ComputeRoutes, url: str, options: ServerSection) -> None:
        self.background = None
        self._compute = compute
        self._url = url
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run it."""
        self._compute.check_there()
        body = await read_json(scope, receive, self._options.max_body_bytes)
        data = self._compute.with_trace(body, scope["headers"])
        async with _Watch(receive) as client:
            job = await self._compute.begin(self._url, data)
            client.on_gone(job.run.abort)
            try:
                if not client.gone:
                    job.run.submit()
                    await self._answer(job, client, send)
            finally:
                job.run.abort()
                if self._options.log_requests:
                    log_request(job, scope.get("state", {}).get("request_id"), client.gone)

    async def _answer(self, job: Job, client: _Watch, send: Send) -> None:
        headers = ignored_header(job.head.id, job.unknown)
        try:
            if job.stream:
                assert isinstance(job.run, Run), "a beam search is never streamed"
                await _send_stream(job, job.run, headers, send)
            else:
                answer = job.format.whole(await job.run.finish())
                await _send_whole(msgspec.json.encode(answer), headers, send)
        except ApiError:
            if not client.gone:
                raise


class _Watch:
    """Notices when a client hangs up: one task, from when its request is read until it is answered."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._then: Callable[[], None] | None = None
        self.gone = False

    def on_gone(self, then: Callable[[], None]) -> None:
        """Say what to do at that moment."""
        self._then = then

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._then is not None:
            self._then()

    async def __aenter__(self) -> _Watch:
        self._task = asyncio.create_task(self._wait(), name="client-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()


async def _send_whole(body: bytes, headers: Mapping[str, str], send: Send) -> None:
    """Send an answer in one piece."""
    told = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(told)})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(job: Job, run: Run, headers: Mapping[str, str], send: Send) -> None:
    """Send a stream; it begins with the first token, so that what fails before has a status of its own."""
    updates = await run.take()
    _raise_failure(updates)
    await send({"type": "http.response.start", "status": 200, "headers": _raw({**STREAM_HEADERS, **headers})})
    try:
        await _send_updates(job, run, updates, send)
        last = job.format.end()
    except ApiError as error:
        last = error_event(error)
    except HeadraceError as error:
        last = error_event(api_error(error))
    except Exception:
        logger.exception("%s: its stream broke off", job.head.id)
        last = error_event(ApiError(500, "the server failed to write the answer; its log says why"))
    await send({"type": "http.response.body", "body": last + DONE})


async def _send_updates(job: Job, run: Run, updates: list[tuple[int, RequestUpdate]], send: Send) -> None:
    while True:
        events: list[bytes] = []
        try:
            for place, update in job.intervals.take(updates):
                job.format.write(place, update, events)
        finally:
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        if run.is_over:
            return
        updates = await run.take()


def _raise_failure(updates: list[tuple[int, RequestUpdate]]) -> None:
    for _, update in updates:
        for delta in update.deltas:
            failure = failure_of(delta)
            if failure is not None:
                raise failure


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
