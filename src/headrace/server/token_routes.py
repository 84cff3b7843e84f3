"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, as the compute routes do it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.async_llm import AsyncLLM
from headrace.core.interfaces import Tokenizer
from headrace.output.detokenizer import IncrementalDetokenizer
from headrace.server.answers import Text, Tokens
from headrace.server.bodies import read_json
from headrace.server.chat import template_messages, template_options
from headrace.server.compute import ComputeRoutes
from headrace.server.errors import ApiError, short
from headrace.server.model_routes import json_response
from headrace.server.openapi import answers, asks_for
from headrace.server.options import ServerSection
from headrace.server.protocol import DetokenizeBody, TokenizeBody
from headrace.server.tokens import TokenWriter

__all__ = ["add_token_routes"]

LONG_TEXT = 2048
"""Characters or ids from which on the work is done on a thread, so that streams go on meanwhile."""


def add_token_routes(app: FastAPI, engine: AsyncLLM, compute: ComputeRoutes, options: ServerSection) -> None:
    """Add both routes."""

    @app.post(
        "/tokenize",
        tags=["tokens"],
        openapi_extra=asks_for(TokenizeBody),
        responses=answers(Tokens, 400, 401, 404, 413, 503),
    )
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of a conversation."""
        compute.check_there()
        data = await read_json(request.scope, request.receive, options.max_body_bytes)
        body, headers = compute.read_plain(TokenizeBody, data)
        ids = await _encode(engine, body)
        strings = (
            [TokenWriter(engine.front.tokenizer).text(i) for i in ids] if body.return_token_strs else None
        )
        answer = Tokens(
            count=len(ids), max_model_len=engine.front.max_model_len, tokens=ids, token_strs=strings
        )
        response = json_response(answer)
        response.headers.update(headers)
        return response

    @app.post(
        "/detokenize",
        tags=["tokens"],
        openapi_extra=asks_for(DetokenizeBody),
        responses=answers(Text, 400, 401, 404, 413, 503),
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens spelt out."""
        compute.check_there()
        data = await read_json(request.scope, request.receive, options.max_body_bytes)
        body, headers = compute.read_plain(DetokenizeBody, data)
        tokenizer, size = _tokenizer(engine), engine.front.vocab_size
        for place, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                raise ApiError(
                    400,
                    f"tokens[{place}]: {short(token_id)} is not in the model's vocabulary; ids are from 0 to "
                    f"{size - 1}",
                    param=f"tokens[{place}]",
                )
        text = await _at_ease(len(body.tokens), _decode, tokenizer, body.tokens)
        response = json_response(Text(text))
        response.headers.update(headers)
        return response


async def _encode(engine: AsyncLLM, body: TokenizeBody) -> list[int]:
    """Return the ids of a body's text. Raises `ApiError` where it holds none, or two."""
    tokenizer = _tokenizer(engine)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    if body.messages is None:
        text, is_chat = body.prompt or "", False
    else:
        choices = template_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
        text, is_chat = await engine.render_chat(template_messages(body.messages), **choices), True
    special = not is_chat if body.add_special_tokens is None else body.add_special_tokens

    def encode() -> list[int]:
        return tokenizer.encode(text, add_special_tokens=special, parse_special=is_chat)

    ids: list[int] = await _at_ease(len(text), encode)
    return ids


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])


def _tokenizer(engine: AsyncLLM) -> Tokenizer:
    tokenizer = engine.front.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; it takes and gives token ids alone")
    return tokenizer


async def _at_ease(size: int, work: Any, *arguments: Any) -> Any:
    """Do work at once where it is small, else on a thread."""
    return work(*arguments) if size < LONG_TEXT else await asyncio.to_thread(work, *arguments)
