"""A real HTTP server in a thread, over a real engine in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import uvicorn

from headrace import AsyncLLM, hookimpl
from headrace.core.interfaces import EngineListener
from headrace.core.plan import StepPlan
from headrace.server.app import build_app
from headrace.server.options import ServerSection

MODEL_LEN = 128


@dataclass
class Answer:
    """What a server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read by a parser that knows no NaN."""
        return json.loads(self.body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    @property
    def error(self) -> Any:
        """The error, which must have OpenAI's shape and be short."""
        assert self.status >= 400, self.body[:500]
        assert len(self.body) < 8000
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream, which must end as one does."""
        assert self.status == 200, self.body[:500]
        assert self.headers["content-type"].startswith("text/event-stream")
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


class Pace(EngineListener):
    """A plugin that makes an engine slow where a test must see it in the middle of its work."""

    name = "pace"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.seconds = 0.0
        """What every step takes at least."""
        self.steps: threading.Semaphore | None = None
        """Where there is one, every step takes one from it. A step that gets none within 30 s fails."""

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.engine_listener("pace", lambda context: self)

    def on_plan(self, plan: StepPlan) -> None:
        time.sleep(self.seconds)
        if self.steps is not None and not self.steps.acquire(timeout=30):
            raise TimeoutError("nobody let the next step be taken")


@dataclass
class Http:
    """One application of an engine, at a port."""

    port: int
    engine: AsyncLLM
    loop: asyncio.AbstractEventLoop
    pace: Pace
    clients: list[openai.OpenAI] = field(default_factory=list)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Ask; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, data, {"Content-Type": "application/json", **told})
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())

    def complete(self, prompt: Any, **body: Any) -> Answer:
        """`POST /v1/completions`, greedy unless told otherwise."""
        return self.ask("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, **body})

    def chat(self, messages: Any, **body: Any) -> Answer:
        """`POST /v1/chat/completions`, greedy unless told otherwise; a text stands for a user's message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, "temperature": 0, **body})

    def check_alive(self) -> None:
        """The probe after everything bad."""
        answer = self.complete("one two three", max_tokens=4)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 4

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The official client."""
        self.clients.append(
            openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0)
        )
        return self.clients[-1]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def metric(self, name: str) -> float:
        """One of the engine's series."""
        return float(self.run(self.engine.metrics())[name])

    @contextlib.contextmanager
    def variant(self, **options: Any) -> Iterator[Http]:
        """The same engine behind an application with other options."""
        server = serve(self.engine, options)
        task = asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        try:
            http = Http(self.run(port_of(server)), self.engine, self.loop, self.pace)
            try:
                yield http
            finally:
                for client in http.clients:
                    client.close()
        finally:
            server.should_exit = True
            task.result(30)


def serve(engine: AsyncLLM, options: dict[str, Any]) -> uvicorn.Server:
    """Return a server that is to be run."""
    app = build_app(engine, ServerSection(**options))
    return uvicorn.Server(
        uvicorn.Config(
            app, port=0, http="httptools", lifespan="off", log_config=None, timeout_graceful_shutdown=2
        )
    )


async def port_of(server: uvicorn.Server) -> int:
    """Wait until it listens."""
    while not server.started:
        await asyncio.sleep(0.005)
    return int(server.servers[0].sockets[0].getsockname()[1])


@contextlib.contextmanager
def serving(options: dict[str, Any], model: str = "smollm2", **engine_options: Any) -> Iterator[Http]:
    """Start an engine and a server on a thread of their own."""
    ready: list[Http] = []
    told, stop, pace = threading.Event(), asyncio.Event(), Pace()
    engine_options["plugins"] = [*engine_options.get("plugins", ()), pace]

    async def main() -> None:
        try:
            engine = await AsyncLLM.start(model, engine_process=False, show_report=False, **engine_options)
            async with engine:
                server = serve(engine, options)
                task = asyncio.create_task(server.serve())
                ready.append(Http(await port_of(server), engine, asyncio.get_running_loop(), pace))
                told.set()
                await stop.wait()
                server.should_exit = True
                await task
        finally:
            told.set()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    told.wait()
    try:
        yield ready[0]
    finally:
        if ready:
            ready[0].loop.call_soon_threadsafe(stop.set)
            for client in ready[0].clients:
                client.close()
        thread.join()


@pytest.fixture(scope="session")
def server() -> Iterator[Http]:
    """The server that most tests ask; mark them with `weights`."""
    limits = {"max_prompts": 16, "max_choices": 24, "max_body_bytes": 12_000_000}
    with serving(limits, max_model_len=MODEL_LEN) as http:
        yield http


@pytest.fixture(scope="session")
def http_server() -> Callable[..., contextlib.AbstractContextManager[Http]]:
    """Starts other servers: `http_server(server_options, model, **engine_options)`."""
    return serving
