"""`headrace batch`: requests from a file, in OpenAI's batch format, answered into a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.errors import RUNTIME
from headrace.cli.options import EngineArgs, engine_command
from headrace.cli.requests import emit
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.batch.run import Handler, Summary

__all__ = ["batch", "open_handler"]

Input = Annotated[
    Path, typer.Option("-i", "--input-file", metavar="FILE", help="Requests, a JSON object a line.")
]
Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output-file",
        metavar="FILE",
        help="Answers, added as they finish; what it has is not done again.",
    ),
]
Concurrency = Annotated[
    int,
    typer.Option("--max-concurrency", metavar="N", min=1, help="Most requests handed to the engine at once."),
]


@engine_command
def batch(
    args: EngineArgs, input_file: Input, output_file: Output, max_concurrency: Concurrency = 256
) -> None:
    """Answer a file of requests in OpenAI's batch format; the same call continues a run that was ended.

    Lines are objects with custom_id, method POST, url (/v1/chat/completions or /v1/completions) and body. Answers
    come in the order in which they finish.
    """
    from headrace.batch.journal import open_journal
    from headrace.batch.lines import check_lines
    from headrace.batch.run import run_lines
    from headrace.progress import counting

    keys = check_lines(input_file)
    _check_writable(input_file, output_file)
    with open_journal(output_file, keys) as journal:
        there = len(journal.done)

        async def run() -> Summary:
            async with open_handler(args) as handler:
                with counting(len(keys) - there, "requests") as tick:
                    return await run_lines(
                        input_file, journal, handler, max_concurrency=max_concurrency, tick=tick
                    )

        summary = asyncio.run(run()) if there < len(keys) else None
    _tell(summary, len(keys), there)
    if summary is not None and summary.failed:
        raise typer.Exit(RUNTIME)


@asynccontextmanager
async def open_handler(args: EngineArgs) -> AsyncIterator[Handler]:
    """Start the engine that flags and file describe; entered, it answers requests as its server would."""
    from headrace.async_llm import AsyncLLM
    from headrace.server.compute import ComputeRoutes
    from headrace.server.options import ServerSection
    from headrace.server.template import chosen_template

    started = args.start()
    options = started.config.section("server", ServerSection)
    template = chosen_template(options)
    async with await AsyncLLM.from_started(started, chat_template=template) as llm:
        if started.config.show_report:
            sys.stderr.write(f"{llm.report}\n")
        yield ComputeRoutes(llm, options).answer


def _check_writable(input_file: Path, output_file: Path) -> None:
    """Raises `ConfigError`."""
    if not output_file.absolute().parent.is_dir():
        raise ConfigError(
            f"--output-file {output_file} cannot be written: it must be a file in a folder that exists",
            option="output_file",
        )
    if output_file.resolve() == input_file.resolve():
        raise ConfigError(
            f"--output-file {output_file} is the input file; name another one", option="output_file"
        )


def _tell(summary: Summary | None, total: int, there: int) -> None:
    if summary is None:
        emit(f"all {total} requests were there already\n")
        return
    emit(
        f"{total} requests: {there} were there already, {summary.answered} answered, {summary.refused} refused, "
        f"{summary.failed} failed, {summary.invalid} no requests\n"
    )
    if summary.failed:
        emit("the same call does those that failed again\n")
