"""`headrace generate`."""

from __future__ import annotations

import sys

import typer

from headrace.cli.options import EngineArgs, engine_command
from headrace.cli.requests import (
    Json,
    Prompts,
    failed,
    read_prompts,
    shows_progress,
    start_llm,
    write_json,
    write_text,
)
from headrace.cli.sampling import Sampling, sampling_flags
from headrace.core.errors import RequestError

__all__ = ["generate"]


@engine_command
@sampling_flags
def generate(args: EngineArgs, sampling: Sampling, prompt: Prompts = None, as_json: Json = False) -> None:
    """Continue prompts: text goes to the model as it is. Without -p, standard input is the prompt.

    Answers go to standard output, everything else to standard error. --max-tokens is 16 where it is not given.
    """
    params = sampling.params()
    sampling.check_shown(as_json)
    given = list(prompt or ())
    if not given and not sys.stdin.isatty():
        given = ["-"]
    texts = read_prompts(given)
    if not any(texts):
        raise RequestError("no prompt: give one with -p TEXT, or pipe one in", param="prompt")
    with start_llm(args) as llm:
        outputs = llm.generate(texts, params, use_tqdm=shows_progress(as_json))
    (write_json if as_json else write_text)(outputs)
    if code := failed(outputs):
        raise typer.Exit(code)
