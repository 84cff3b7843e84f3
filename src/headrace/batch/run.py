"""A batch from its input to its output: lines go to a handler, so many at a time, and are written as they finish."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.batch.journal import Journal, worth_retrying
from headrace.batch.lines import BatchLine, read_lines

__all__ = ["Handler", "Summary", "run_lines"]


class Handler(Protocol):
    """Answers one request, as the server's route of that name would."""

    async def __call__(self, url: str, data: Mapping[str, Any], /) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and the body of the answer; a request that is wrong is an answer, too.

        url: one of `URLS`.
        data: the request's JSON, never streamed.
        What it raises ends the run; lines that were under way are done again by the next one.
        """
        ...


@dataclass
class Summary:
    """What a run did."""

    answered: int = 0
    """Lines with a good answer."""
    refused: int = 0
    """Lines whose request was wrong."""
    failed: int = 0
    """Lines the server failed on; the next run does them again."""
    invalid: int = 0
    """Lines that are no request."""


async def run_lines(
    source: Path,
    journal: Journal,
    handler: Handler,
    *,
    max_concurrency: int,
    tick: Callable[[], None] = lambda: None,
) -> Summary:
    """Do all lines of a file that the journal does not have.

    max_concurrency: how many the handler works on at once; no more are in memory.
    tick: called after every line.
    Raises what the handler raises, when the others under way are cancelled, and `OSError` where a line cannot be
    written.
    """
    summary = Summary()
    pending = (line for line in read_lines(source) if line.key not in journal.done)
    workers = [
        asyncio.create_task(_work(pending, journal, handler, summary, tick)) for _ in range(max_concurrency)
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return summary


async def _work(
    pending: Iterator[BatchLine],
    journal: Journal,
    handler: Handler,
    summary: Summary,
    tick: Callable[[], None],
) -> None:
    """Do one line after another, shared with the other workers."""
    for line in pending:
        if line.error:
            summary.invalid += 1
            entry = _entry(line, error={"code": "invalid_line", "message": line.error, "line": line.number})
        else:
            status, body = await handler(line.url, line.body)
            _count(summary, status)
            request_id = str(body.get("id") or f"req_{uuid.uuid4().hex}")
            entry = _entry(line, response={"status_code": status, "request_id": request_id, "body": body})
        journal.write(entry, line.key)
        tick()


def _count(summary: Summary, status: int) -> None:
    if status < 400:
        summary.answered += 1
    elif worth_retrying(status):
        summary.failed += 1
    else:
        summary.refused += 1


def _entry(
    line: BatchLine, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a line of the output; its first bytes are `journal.START`."""
    number = f"batch_req_{uuid.uuid4().hex}"
    return {"id": number, "custom_id": line.custom_id, "response": response, "error": error}
