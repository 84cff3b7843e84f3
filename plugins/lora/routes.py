"""Routes that load and unload adapters while a server runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from headrace.core.interfaces.build import HttpContext
from headrace.plugins.lora.options import LoraSection

__all__ = ["add_lora_routes"]

POLL_SECONDS = 0.01
MAX_BODY = 64 * 1024


def add_lora_routes(context: HttpContext) -> None:
    """Add both routes, where the configuration allows loading."""
    if not context.config.section("lora", LoraSection).loading:
        return
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response

    engine = context.engine

    def answer(outcome: dict[str, Any]) -> Response:
        if outcome["status"] != 200:
            raise HTTPException(outcome["status"], outcome["text"])
        return PlainTextResponse(outcome["text"])

    async def fields(request: Request, *names: str) -> dict[str, Any]:
        """Read the body. Raises `HTTPException` 400 where a text is missing."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"the body is longer than {MAX_BODY} bytes")
        try:
            data = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is no JSON: {str(error)[:200]}") from None
        if not isinstance(data, dict):
            raise HTTPException(400, "the body must be a JSON object")
        for name in names:
            if not isinstance(data.get(name), str) or not data[name] or "\0" in data[name]:
                raise HTTPException(
                    400, f"{name} must be a text that is not empty, got {data.get(name)!r:.100}"
                )
        return data

    async def load(request: Request) -> Response:
        """Load an adapter from a folder of the server, under a name."""
        data = await fields(request, "lora_name", "lora_path")
        in_place = data.get("load_inplace", False)
        if not isinstance(in_place, bool):
            raise HTTPException(400, f"load_inplace must be true or false, got {in_place!r:.100}")
        outcome = await engine.call("lora", "load", data["lora_name"], data["lora_path"], in_place)
        while outcome is None or "ticket" in outcome:
            if outcome is not None:
                ticket = outcome["ticket"]
            await asyncio.sleep(POLL_SECONDS)
            outcome = await engine.call("lora", "loaded", ticket)
        return answer(outcome)

    async def unload(request: Request) -> Response:
        """Forget an adapter's name; requests that run keep it to their end."""
        data = await fields(request, "lora_name")
        return answer(await engine.call("lora", "unload", data["lora_name"]))

    for path, endpoint in (("/v1/load_lora_adapter", load), ("/v1/unload_lora_adapter", unload)):
        context.app.add_route(path, endpoint, methods=["POST"])
