"""A small OpenAI-compatible server without a model: clients are tested against it, and it can be run by hand.

    python tests/fake_openai.py --port 8000 --itl 0.01

Its tokens are bytes, its answers a function of the prompt, its speed what it is told. It counts what it is asked and
misbehaves on demand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel

MODEL = "fake"
STALLED = 60.0


@dataclass
class Behaviour:
    """How it answers; tests change it while it runs."""

    ttft: float = 0.0
    """Seconds before the first token."""
    itl: float = 0.0
    """Seconds between tokens."""
    max_model_len: int = 100_000
    api_key: str | None = None
    usage: bool = True
    faulty: bool = False
    """Whether `/detokenize` fails."""
    fault: Callable[[dict[str, Any]], str] = lambda body: ""
    """What goes wrong with a request: `refuse`, or, in the middle of the stream, `error`, `cut` and `stall`."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Paths and bodies of what it was asked to compute, as they came."""
    running: int = 0
    most_running: int = 0


class Text(BaseModel):
    """What `/tokenize` takes."""

    prompt: str


class Ids(BaseModel):
    """What `/detokenize` takes."""

    tokens: list[int]


def encode(text: str) -> list[int]:
    return list(text.encode(errors="replace"))


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def answer(ids: list[int], max_tokens: int, ignore_eos: bool) -> list[str]:
    """Return the tokens of an answer: letters that depend on all of the prompt."""
    start = sum((place + 1) * token for place, token in enumerate(ids))
    count = max_tokens if ignore_eos else min(max_tokens, 2 + start % 30)
    return [chr(ord("a") + (start + 7 * place) % 26) for place in range(count)]


def create(behaviour: Behaviour) -> FastAPI:
    """Return the application."""

    async def guard(request: Request) -> None:
        key = behaviour.api_key
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            raise HTTPException(401, "wrong key")

    app = FastAPI(dependencies=[Depends(guard)])

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": MODEL, "max_model_len": behaviour.max_model_len}]}

    @app.get("/health")
    @app.get("/ready")
    async def health() -> Any:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Any:
        lines = [
            f'headrace:num_requests_running{{model_name="{MODEL}"}} {behaviour.running}.0',
            f'headrace:num_requests_waiting{{model_name="{MODEL}"}} 0.0',
            f'headrace:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.0',
            f'headrace:generation_tokens_total{{model_name="{MODEL}"}} 7.0',
        ]
        return PlainTextResponse("\n".join(["# HELP x y", *lines]) + "\n")

    @app.post("/tokenize")
    async def tokenize(text: Text) -> Any:
        ids = encode(text.prompt)
        return {"count": len(ids), "max_model_len": behaviour.max_model_len, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(ids: Ids) -> Any:
        if behaviour.faulty:
            return JSONResponse({"error": {"message": "oh", "code": 500}}, 500)
        return {"prompt": decode([token % 256 for token in ids.tokens])}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await read(request)
        if isinstance(body, Response):
            return body
        prompt = body.get("prompt")
        return await respond(request, body, encode(prompt) if isinstance(prompt, str) else prompt, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await read(request)
        if isinstance(body, Response):
            return body
        contents = [message["content"] for message in body.get("messages", [])]
        text = "".join(c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents)
        return await respond(request, body, encode(f"<{text}>"), chat=True)

    async def read(request: Request) -> Any:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
        if not isinstance(body, dict) or not (body.get("prompt") or body.get("messages")):
            return JSONResponse({"error": {"message": "no prompt", "code": 400}}, 400)
        behaviour.asked.append((request.url.path, body))
        return body

    async def respond(request: Request, body: dict[str, Any], ids: list[int], chat: bool) -> Any:
        fault = behaviour.fault(body)
        if fault == "refuse":
            return JSONResponse({"error": {"message": "no room", "code": 503}}, 503)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        tokens = answer(ids, most, bool(body.get("ignore_eos")))
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        usage["total_tokens"] = sum(usage.values())
        if body.get("stream"):
            return StreamingResponse(
                stream(tokens, usage, body, chat=chat, fault=fault), media_type="text/event-stream"
            )
        with running():
            await asyncio.sleep(behaviour.ttft + behaviour.itl * (len(tokens) - 1))
        text = "".join(tokens)
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        found = {"index": 0, **choice, "finish_reason": "length"}
        return {"id": "x-1", "model": MODEL, "choices": [found], "usage": usage}

    async def stream(
        tokens: list[str], usage: dict[str, int], body: dict[str, Any], *, chat: bool, fault: str
    ) -> AsyncIterator[bytes]:
        def event(**fields: Any) -> bytes:
            return b"data: " + json.dumps({"id": "x-1", "model": MODEL, **fields}).encode() + b"\n\n"

        def choice(text: str | None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
            if chat:
                content = {} if text is None else {"content": text}
                return {"index": 0, "delta": {**delta, **content}, "finish_reason": reason}
            return {"index": 0, "text": text or "", "finish_reason": reason}

        middle = min(2, len(tokens) - 1)
        with running():
            if chat:
                yield event(choices=[choice("", role="assistant")])
            await asyncio.sleep(behaviour.ttft)
            for place, token in enumerate(tokens):
                if place:
                    await asyncio.sleep(behaviour.itl)
                if fault == "cut" and place == middle:
                    return
                if fault == "stall" and place == middle:
                    await asyncio.sleep(STALLED)
                if fault == "error" and place == middle:
                    yield event(error={"message": "the engine is gone", "code": 500})
                    break
                last = None if chat or place < len(tokens) - 1 else "length"
                yield event(choices=[choice(token, last)])
            if chat:
                yield event(choices=[choice(None, "length")])
            if behaviour.usage and (body.get("stream_options") or {}).get("include_usage"):
                yield event(choices=[], usage=usage)
            yield b"data: [DONE]\n\n"

    @contextlib.contextmanager
    def running() -> Iterator[None]:
        behaviour.running += 1
        behaviour.most_running = max(behaviour.most_running, behaviour.running)
        try:
            yield
        finally:
            behaviour.running -= 1

    return app


@contextlib.contextmanager
def serve(behaviour: Behaviour) -> Iterator[str]:
    """Serve from a thread, on a port of its own; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create(behaviour), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ttft", type=float, default=0.05, help="seconds")
    parser.add_argument("--itl", type=float, default=0.01, help="seconds")
    arguments = parser.parse_args()
    app = create(Behaviour(ttft=arguments.ttft, itl=arguments.itl))
    uvicorn.run(app, port=arguments.port, log_level="warning", ws="none")


if __name__ == "__main__":
    main()
