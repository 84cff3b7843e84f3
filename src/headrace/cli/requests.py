"""What commands that ask a model share: prompts from flags and standard input, a started `LLM`, answers as lines."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.errors import RUNTIME
from headrace.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from headrace.cli.options import EngineArgs
    from headrace.llm import LLM
    from headrace.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput

__all__ = [
    "Json",
    "Prompts",
    "Streamed",
    "emit",
    "failed",
    "interrupts",
    "json_line",
    "read_prompts",
    "read_stdin",
    "shows_progress",
    "start_llm",
    "stream_out",
    "write_json",
    "write_text",
]

Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="A prompt; may be repeated. - reads standard input, whose last newline is left out.",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Write one JSON line a prompt to standard output and nothing else: index, text, token_ids, "
        "finish_reason, stop_reason, usage; with --n above 1 the answers are in choices.",
    ),
]


def read_prompts(given: Sequence[str]) -> list[str]:
    """Return the prompts of `-p`, with `-` replaced by standard input. Raises `RequestError`."""
    if list(given).count("-") > 1:
        raise RequestError(
            "-p - is given twice, and standard input can be read once; keep one", param="prompt"
        )
    return [read_stdin() if text == "-" else text for text in given]


def read_stdin() -> str:
    """Return standard input without its last newline. Raises `RequestError` if it is not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    data: bytes = b"" if buffer is None else buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}", param="prompt"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def start_llm(args: EngineArgs, chat_template: Path | None = None) -> LLM:
    """Start the engine that flags and file describe. Raises as `LLM` does, and `ConfigError` for the template."""
    template = None if chat_template is None else _read_template(chat_template)
    with _kept_interrupt():
        # Imported here: with it comes torch.
        from headrace.llm import LLM

        return LLM.from_started(args.start(), chat_template=template)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template {path} cannot be read: {why}; it must be a Jinja file", option="chat_template"
        ) from None


def shows_progress(as_json: bool) -> bool:
    """Whether bars are drawn: for somebody who looks at standard error."""
    return not as_json and sys.stderr.isatty()


# Answers ---------------------------------------------------------------------------------------------


def write_text(outputs: Sequence[RequestOutput]) -> None:
    """Write answers as text: a single one alone, several under a line with their numbers."""
    several = len(outputs) > 1 or any(len(output.outputs) > 1 for output in outputs)
    for number, output in enumerate(outputs):
        for answer in output.outputs:
            if several:
                which = f", answer {answer.index}" if len(output.outputs) > 1 else ""
                emit(f"== prompt {number}{which} ==\n")
            emit(f"{answer.text}\n")


def write_json(outputs: Sequence[RequestOutput], *, start: int = 0) -> None:
    """Write answers as JSON, a line a prompt, numbered from `start`."""
    for index, output in enumerate(outputs, start):
        emit(json.dumps(json_line(index, output)) + "\n")


def json_line(index: int, output: RequestOutput) -> dict[str, Any]:
    """Return what `--json` tells of one prompt; several answers are in `choices`."""
    answers = [_choice(answer) for answer in output.outputs]
    prompt = len(output.prompt_token_ids)
    completion = sum(len(answer.token_ids) for answer in output.outputs)
    line: dict[str, Any] = {"index": index}
    line |= answers[0] if len(answers) == 1 else {"choices": answers}
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [_candidates(entry) for entry in output.prompt_logprobs]
    line["usage"] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": output.num_cached_tokens,
    }
    return line


def _choice(answer: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.error is not None:
        choice["error"] = answer.error
    if answer.logprobs is not None:
        choice["cumulative_logprob"] = answer.cumulative_logprob
        choice["logprobs"] = [_candidates(entry) for entry in answer.logprobs]
    return choice


def _candidates(entry: dict[int, Logprob] | None) -> list[dict[str, Any]] | None:
    """The candidates at one position, the token itself first."""
    if entry is None:
        return None
    return [
        {"token_id": token, "token": item.decoded_token, "logprob": item.logprob, "rank": item.rank}
        for token, item in entry.items()
    ]


def failed(outputs: Iterable[RequestOutput]) -> int:
    """Tell on standard error what went wrong with single answers; return the exit status."""
    code = 0
    for number, output in enumerate(outputs):
        for answer in output.outputs:
            if answer.finish_reason == "error":
                sys.stderr.write(f"error: prompt {number}: {' '.join(str(answer.error).split())}\n")
                code = RUNTIME
    return code


def emit(text: str) -> None:
    """Write to standard output at once; characters that its encoding lacks become question marks."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
        out.reconfigure(errors="replace")
    out.write(text)
    out.flush()


# Streams ---------------------------------------------------------------------------------------------


@dataclass
class Streamed:
    """What came out of one streamed answer."""

    text: str = ""
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)
    """Seconds on the performance counter: the question, then every delta that brought tokens."""
    finish_reason: str | None = None
    """None: it was stopped by Ctrl-C."""
    error: str | None = None


def stream_out(
    deltas: Iterator[CompletionDelta],
    stopped: Callable[[], bool],
    clock: Callable[[], float],
    write: Callable[[str], None] = emit,
) -> Streamed:
    """Write an answer as it comes, until its end or until `stopped`. Raises what the request raises."""
    answer = Streamed(times=[clock()])
    try:
        for delta in deltas:
            answer.text += delta.text
            if delta.token_ids:
                answer.num_tokens += len(delta.token_ids)
                answer.times.append(clock())
            if delta.text:
                write(delta.text)
            answer.finish_reason, answer.error = delta.finish_reason, delta.error
            if stopped() and answer.finish_reason is None:
                break
    finally:
        getattr(deltas, "close", lambda: None)()
    return answer


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether Ctrl-C was pressed; a second press interrupts as usual.

    The first only sets a mark, so that the engine finishes its step and can be used afterwards.
    """
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _kept_interrupt() -> Iterator[None]:
    """Raise a Ctrl-C at the end, too: imports of large libraries catch everything in places, and it would be lost."""
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt
