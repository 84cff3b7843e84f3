"""A server under load: requests sent at their times, answers read as they stream.

What is measured is the server as a client sees it, so the client does little: bodies are encoded beforehand and
figures are made afterwards. Its own CPU seconds are told, since both may share a machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from headrace.bench.payloads import Prompt
from headrace.bench.streams import Answer, EventReader

__all__ = ["Load", "Run", "run_load"]

LONGEST = 6 * 3600.0
"""Seconds an answer may take: as good as any, as in vLLM's benchmark."""
ERROR_BYTES = 300
"""How much of a refusal is told."""

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """How requests are sent."""

    url: str
    headers: Mapping[str, str]
    times: Sequence[float]
    """When each is sent, in seconds from the start."""
    max_concurrency: int | None = None
    """How many are out at once; more wait in the client, which is told as their queue time. None: no limit."""
    keep_chunks: bool = False
    """Whether texts are asked for afterwards."""


@dataclass(frozen=True)
class Run:
    """What a load came to."""

    answers: list[Answer]
    """In the order of the requests."""
    duration: float
    """Seconds from the start until the last answer ended."""
    client_cpu_s: float
    """CPU seconds of this process meanwhile."""


def run_load(
    load: Load,
    prompts: Sequence[Prompt],
    bodies: Sequence[bytes],
    *,
    tick: Callable[[], None] = lambda: None,
) -> Run:
    """Send all requests and wait for all answers; one that fails says so in its `Answer`.

    prompts, bodies: one each for a time of the load, in that order.
    tick: called after every answer.
    """
    return _run(_send_all(load, prompts, bodies, tick))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On uvloop where there is one: it leaves more of the machine to the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


async def _send_all(
    load: Load, prompts: Sequence[Prompt], bodies: Sequence[bytes], tick: Callable[[], None]
) -> Run:
    # The connector must not queue: places among those that run are given out here, where waiting is told.
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None)
    timeout = aiohttp.ClientTimeout(total=LONGEST)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=load.headers) as session:
        places = nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
        cpu, start = time.process_time(), time.perf_counter()
        tasks = []
        for at, prompt, body in zip(load.times, prompts, bodies, strict=True):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(_send(session, load, places, prompt, body, tick)))
        answers = await asyncio.gather(*tasks)
        return Run(answers, time.perf_counter() - start, time.process_time() - cpu)


async def _send(
    session: aiohttp.ClientSession,
    load: Load,
    places: AbstractAsyncContextManager[None],
    prompt: Prompt,
    body: bytes,
    tick: Callable[[], None],
) -> Answer:
    """Send one request when there is a place for it, and read its answer to the end."""
    arrived = time.perf_counter()
    async with places:
        start = time.perf_counter()
        answer = Answer(start, start - arrived, prompt.num_tokens)
        reader = EventReader(answer, load.keep_chunks)
        try:
            async with session.post(load.url, data=body) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reader.feed(data, time.perf_counter())
                else:
                    said = (await response.content.read(ERROR_BYTES)).decode(errors="replace")
                    answer.error = f"HTTP {response.status}: {said}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
    _settle(answer, reader)
    tick()
    return answer


def _settle(answer: Answer, reader: EventReader) -> None:
    """Say what is wrong with an answer that is not complete, and count what the server did not."""
    if not answer.error and not reader.done:
        answer.error = "the stream ended without [DONE]"
    elif not answer.error and not answer.times:
        answer.error = "the answer has no token"
    if answer.error:
        answer.output_tokens = 0
    else:
        answer.output_tokens = answer.output_tokens or len(answer.times)
