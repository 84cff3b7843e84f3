"""`headrace chat`: one question and its answer, or a conversation."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.conversation import Conversation, Message, messages_of, talk
from headrace.cli.errors import RUNTIME
from headrace.cli.options import EngineArgs, engine_command
from headrace.cli.requests import (
    Json,
    Prompts,
    Streamed,
    emit,
    failed,
    interrupts,
    read_prompts,
    shows_progress,
    start_llm,
    stream_out,
    write_json,
    write_text,
)
from headrace.cli.sampling import Sampling, sampling_flags
from headrace.core.errors import RequestError

if TYPE_CHECKING:
    from headrace.core.sampling_params import SamplingParams
    from headrace.llm import LLM

__all__ = ["chat"]

System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="The system message.", show_default=False),
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", metavar="FILE", help="Replaces the model's template.", show_default=False
    ),
]


@engine_command
@sampling_flags
def chat(
    args: EngineArgs,
    sampling: Sampling,
    prompt: Prompts = None,
    system: System = None,
    chat_template: Template = None,
    as_json: Json = False,
) -> None:
    """Talk to a model, or with -p ask it one question; several are a conversation each and answered together.

    Without -p a terminal is asked for turns (/help lists commands), and of anything else each line is a turn. When
    the conversation no longer fits the model's context, the older half of its turns is dropped. Answers go to
    standard output, everything else to standard error. An answer may be as long as the context allows.
    """
    params = sampling.params(max_tokens=None)
    sampling.check_shown(as_json)
    if prompt:
        questions = read_prompts(prompt)
        if not all(questions):
            raise RequestError("a question is empty; it must hold at least one character", param="prompt")
        with start_llm(args, chat_template) as llm:
            code = _answer(llm, [messages_of(system, text) for text in questions], params, as_json)
    elif params.n > 1:
        raise RequestError(
            f"n is {params.n}, and a conversation goes on with one answer; use -p, or n=1", param="n"
        )
    else:
        with start_llm(args, chat_template) as llm:
            # Says at once if there is no template; a stream that is not read asks the engine nothing.
            llm.stream_chat(messages_of(system, "?"), params)
            code = _converse(llm, system, params, as_json)
    if code:
        raise typer.Exit(code)


def _answer(llm: LLM, conversations: list[list[Message]], params: SamplingParams, as_json: bool) -> int:
    """Answer conversations; return the exit status."""
    if as_json or len(conversations) > 1 or params.n > 1:
        outputs = llm.chat(conversations, params, use_tqdm=shows_progress(as_json))
        (write_json if as_json else write_text)(outputs)
        return failed(outputs)
    answer = _streaming(llm, params)(conversations[0])
    if answer.finish_reason is None:
        raise KeyboardInterrupt
    if answer.error is not None:
        _say(f"error: {' '.join(answer.error.split())}")
        return RUNTIME
    return 0


def _converse(llm: LLM, system: str | None, params: SamplingParams, as_json: bool) -> int:
    """Take turns from standard input; return the exit status."""
    is_person = sys.stdin.isatty() and not as_json
    streaming = _streaming(llm, params)

    def scripted(messages: list[Message]) -> Streamed:
        answer = streaming(messages)
        if answer.finish_reason is None:
            raise KeyboardInterrupt
        return answer

    reply = _json_replies(llm, params) if as_json else streaming if is_person else scripted
    conversation = Conversation(reply, _say, system)
    if is_person:
        _say(f"{llm.report.model}: /help lists commands, Ctrl-D ends")
    good = talk(conversation, _prompt_line if is_person else _plain_line, keeps_going=is_person)
    return 0 if good else RUNTIME


def _streaming(llm: LLM, params: SamplingParams) -> Callable[[list[Message]], Streamed]:
    """Return what streams an answer to standard output and ends it with a new line."""

    def reply(messages: list[Message]) -> Streamed:
        with interrupts() as stopped:
            answer = stream_out(llm.stream_chat(messages, params), stopped, time.perf_counter)
        emit("\n")
        return answer

    return reply


def _json_replies(llm: LLM, params: SamplingParams) -> Callable[[list[Message]], Streamed]:
    """Return what writes an answer as a JSON line, numbered by turn."""
    count = 0

    def reply(messages: list[Message]) -> Streamed:
        nonlocal count
        begun = time.perf_counter()
        outputs = llm.chat(messages, params, use_tqdm=False)
        write_json(outputs, start=count)
        count += 1
        only = outputs[0].outputs[0]
        return Streamed(
            text=only.text,
            num_tokens=len(only.token_ids),
            times=[begun, time.perf_counter()],
            finish_reason=only.finish_reason,
            error=only.error,
        )

    return reply


def _prompt_line() -> str:
    """Read a line from a person, with the editing keys and history of the system's readline where there is one."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    try:
        if sys.stdout.isatty():
            return input("> ")
        sys.stderr.write("> ")
        sys.stderr.flush()
        return _plain_line()
    except EOFError:
        _say("")
        raise


def _plain_line() -> str:
    """Read a line of standard input. Raises `EOFError` at its end, `RequestError` if it is no UTF-8."""
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}", param="prompt"
        ) from None
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
