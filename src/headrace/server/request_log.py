"""One line a request in the log: counts and times, never a text."""

from __future__ import annotations

import logging

from headrace.outputs import RequestOutput
from headrace.server.compute import Job
from headrace.server.formats import usage_of

__all__ = ["log_request"]

logger = logging.getLogger(__name__)


def log_request(job: Job, caller_id: str | None, client_gone: bool) -> None:
    """Log how a request went. caller_id: the client's own name for it."""
    outputs = list(job.run.outputs.values())
    usage = usage_of(outputs)
    answers = [answer for output in outputs for answer in output.outputs]
    logger.info(
        "%s%s: %d prompts with %d tokens (%d cached), %d answers with %d tokens (%s)%s",
        job.head.id,
        f" ({caller_id})" if caller_id else "",
        job.run.num_prompts,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        len(answers),
        usage.completion_tokens,
        "the client hung up" if client_gone else ", ".join(sorted({str(a.finish_reason) for a in answers})),
        "".join(map(_times, outputs[:1])),
    )


def _times(output: RequestOutput) -> str:
    """Return the times of a request: of its first prompt, which tells what the others met with."""
    times = output.metrics
    named = {
        "in queue": times.time_in_queue,
        "to the first token": times.time_to_first_token,
        "in all": times.total_time,
    }
    return "".join(f", {seconds:.3f} s {what}" for what, seconds in named.items() if seconds is not None)
