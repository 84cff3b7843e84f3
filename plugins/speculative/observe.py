"""What a step tells of the drafts it verified."""

from __future__ import annotations

from headrace.core.interfaces import RunnerBatch
from headrace.core.plan import StepResult
from headrace.plugins.speculative.draft_length import DraftLengths

__all__ = ["observe"]


def observe(lengths: DraftLengths, batch: RunnerBatch, result: StepResult, seconds: float) -> int:
    """Tell `lengths` what was accepted, and what the step took if it held decodes alone.

    Returns how many requests got a token: so many will be in the next step.
    """
    num_drawing = num_drafts = 0
    decodes = True
    for row in batch.rows:
        tokens = result.requests[row.request_id].tokens
        decodes = decodes and row.count == row.num_drafts + 1
        num_drafts += row.num_drafts
        if tokens:
            num_drawing += 1
            if row.num_drafts:
                lengths.verified(row.request_id, row.num_drafts, min(row.num_drafts, len(tokens) - 1))
    if decodes:
        lengths.step_took(len(batch.rows), num_drafts, seconds)
    return num_drawing
