"""What a process of `headrace bench startup` does: import, start an engine, wait for one token, tell the times.

Standard input is a JSON object with `model`, `file`, `flags` and `prompt_len`. The last line of standard output is
one with `facts` and the `moments` at which each stage was over, on the monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from headrace.cli.errors import clean_exit

__all__ = ["main"]


def main(running: float) -> None:
    """Start, answer, tell. running: when the interpreter could run the first line."""
    asked = json.load(sys.stdin)
    with clean_exit():
        from headrace.bench.facts import run_facts
        from headrace.configuration import start_configuration
        from headrace.core.sampling_params import SamplingParams
        from headrace.llm import LLM

        imported = time.monotonic()
        file = None if asked["file"] is None else Path(asked["file"])
        with LLM.from_started(start_configuration(asked["model"], file=file, flags=asked["flags"])) as llm:
            started = time.monotonic()
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            answer = llm.generate([[0] * asked["prompt_len"]], params, use_tqdm=False)
            answered = time.monotonic()
            if answer[0].error is not None:
                sys.exit(f"error: {answer[0].error}")
            facts = run_facts(llm.report)
    moments = {"interpreter": running, "imports": imported, "engine": started, "first_token": answered}
    sys.stdout.write(f"\n{json.dumps({'moments': moments, 'facts': facts})}\n")
