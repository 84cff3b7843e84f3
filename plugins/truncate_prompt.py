"""`truncate_prompt_tokens`: a prompt that is too long loses its beginning, so that its end and an answer fit.

With `truncation_side` `"right"` it loses its end. A start token stays where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["TruncatePrompt", "headrace_api", "headrace_register", "name"]

name = "truncate_prompt"
headrace_api = ">=1,<2"

OPTION = "truncate_prompt_tokens"
SIDE = "truncation_side"


def _not_nothing(value: int) -> int:
    if value == 0:
        raise ValueError("a prompt of no tokens is none; -1 keeps as many as fit")
    return value


class TruncatePrompt:
    """Input processor: keeps a prompt's last tokens, or its first, and none that would leave an answer no room.

    It runs behind the one that makes tokens.
    """

    name = name

    def __init__(self, context: FrontContext) -> None:
        self._max_model_len = context.max_model_len
        self._start = None if context.tokenizer is None else context.tokenizer.bos_token_id

    def process(self, item: ProcessedInput) -> None:
        """Shorten the prompt where the request's option asks for it."""
        asked = item.params.options.get(OPTION)
        if asked is None or item.token_ids is None:
            return
        fits = self._max_model_len - (0 if item.params.max_tokens == 0 else 1)
        keep = fits if asked == -1 else min(asked, fits)
        ids = item.token_ids
        if len(ids) > keep:
            start = ids[:1] if ids[0] == self._start and keep > 1 else []
            is_left = item.params.options.get(SIDE) in (None, "left")
            item.token_ids = start + (ids[len(start) - keep :] if is_left else ids[len(start) : keep])
            item.text = None  # what is left of it is told by the ids


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the processor and its options."""
    registrar.input_processor(name, TruncatePrompt)
    registrar.request_option(OPTION, Annotated[int, Field(ge=-1, strict=True), AfterValidator(_not_nothing)])
    registrar.request_option(SIDE, Literal["left", "right"])
