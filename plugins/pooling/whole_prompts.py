"""Encoders read a prompt whole, in one step, or not yet."""

from __future__ import annotations

from headrace.core.interfaces import Constraint, Wait
from headrace.core.interfaces.build import CoreContext
from headrace.core.request import Request

__all__ = ["WholePrompts"]


class WholePrompts(Constraint):
    """Parks a request whose prompt is longer than what is left of a step; the next step has more room.

    Steps are large enough for the longest prompt: the start saw to that. Where the model is causal it limits nothing.
    """

    name = "whole_prompts"

    def __init__(self, context: CoreContext) -> None:
        self._causal = context.causal

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        """All of the prompt, or `Wait`."""
        if self._causal or start + count >= request.num_prompt_tokens:
            return count
        return Wait("whole prompt")
