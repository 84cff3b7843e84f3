"""What the serving scripts share: a client, the server's memory and state, checks with limits, files of results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil

from headrace.bench import remote
from headrace.bench.streams import Answer, EventReader
from headrace.testing.serving import Server

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Check",
    "Checks",
    "Client",
    "Request",
    "all_at_once",
    "end",
    "memory",
    "settled",
    "state",
    "text_of",
    "write_results",
]

BENCHMARKS = Path(__file__).resolve().parents[1]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STATE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total")
TIMEOUT = 600.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """Something to ask: greedy, so that it has one answer."""

    url: str
    fields: Mapping[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        """What is sent, without a word about streaming."""
        return {"temperature": 0, **self.fields}


@dataclass
class Client:
    """Asks a server over connections of one session; used within `async with client.session`."""

    base_url: str
    model: str
    session: aiohttp.ClientSession

    @classmethod
    def open(cls, server: Server) -> Client:
        """Make a client, on a running event loop. As many connections as requests: none waits for another."""
        base_url = f"http://127.0.0.1:{server.port}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return cls(base_url, remote.Server(base_url).model()[0], session)

    async def post(self, url: str, body: Any) -> tuple[int, bytes]:
        """Ask with a body as it is, or as JSON; return the status and the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.base_url + url, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def ask(self, request: Request) -> str:
        """Return an answer's text. Raises `RuntimeError` for anything but an answer."""
        status, data = await self.post(request.url, {"model": self.model, **request.body})
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {data[:300]!r}")
        return text_of(json.loads(data))

    async def stream(self, request: Request) -> Answer:
        """Return a streamed answer with its text; one that is not complete has an error."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, **request.body, **options}
        answer = Answer(time.perf_counter(), 0.0, 0)
        reader = EventReader(answer, keep_chunks=True)
        try:
            async with self.session.post(self.base_url + request.url, json=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.read())[:300]!r}"
                    return answer
                async for data in response.content.iter_any():
                    reader.feed(data, time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and not reader.done:
            answer.error = "the stream ended without [DONE]"
        return answer


async def settled(server: Server, seconds: float = 30.0) -> None:
    """Wait until nothing runs or waits and no block is held, so many seconds at most."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        found = await asyncio.to_thread(state, server)
        if not any(value for name, value in found.items() if name != "generation_tokens_total"):
            return
        await asyncio.sleep(0.05)


def end(server: Server, seconds: float = 60.0) -> int | None:
    """End a server as an operator does; return its exit status, or None where it goes on."""
    server.process.terminate()
    try:
        return server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of the one choice in an answer that was not streamed."""
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def all_at_once(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], most: int | None = None
) -> list[R]:
    """Call a function for all items together, or for so many at a time."""
    places = asyncio.Semaphore(most) if most else None

    async def one(item: T) -> R:
        if places is None:
            return await function(item)
        async with places:
            return await function(item)

    return await asyncio.gather(*(one(item) for item in items))


def memory(server: Server) -> dict[str, int]:
    """Return the resident bytes of each of the server's processes by name, and of all as `total`."""
    found: dict[str, int] = {}
    for pid in server.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            name = words[0] if words and words[0].startswith("headrace-") else "serve"
            found[name] = process.memory_info().rss
    return {**found, "total": sum(found.values())}


def state(server: Server) -> dict[str, float]:
    """Return what `/metrics` says of requests, blocks and tokens."""
    return {name: server.metric(name) for name in STATE}


@dataclass(frozen=True)
class Check:
    """Something that must hold, and what was found."""

    name: str
    found: Any
    wanted: str
    passed: bool


@dataclass
class Checks:
    """Those of a run."""

    all: list[Check] = field(default_factory=list)

    def add(self, name: str, found: Any, wanted: str, passed: bool) -> None:
        """Note one, and say so."""
        self.all.append(Check(name, found, wanted, passed))
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {found} ({wanted})", flush=True)


def write_results(path: Path, checks: Sequence[Check], results: Mapping[str, Any]) -> None:
    """Write figures and checks with where and from what they were taken; exit with 1 where a check failed."""
    sys.path.append(str(BENCHMARKS))
    from provenance import provenance

    report = {
        **provenance(),
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
        **results,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")
    if not report["passed"]:
        sys.exit(1)
