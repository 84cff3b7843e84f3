"""`allowed_token_ids`: only these tokens can be drawn; no bias or penalty brings another one back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StrictInt

from headrace.core.errors import RequestError
from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar
    from headrace.core.sampling_params import SamplingParams

__all__ = [
    "AllowedCheck",
    "AllowedTokenIds",
    "allowed_token_ids",
    "headrace_api",
    "headrace_register",
    "name",
]

name = "allowed_token_ids"
headrace_api = ">=1,<2"

AllowedTokenIds = Annotated[list[StrictInt], Field(min_length=1)]
"""The request option; an empty list would leave nothing to draw."""


class AllowedCheck:
    """Input processor: refuses ids that the model does not have."""

    name = "allowed_token_ids"

    def __init__(self, context: FrontContext) -> None:
        self._vocab_size = context.vocab_size

    def process(self, item: ProcessedInput) -> None:
        """Raise `RequestError` naming the first id outside of the vocabulary, and the range."""
        ids = item.params.options.get(name)
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        wrong = next(token_id for token_id in ids if not 0 <= token_id < self._vocab_size)
        raise RequestError(
            f"allowed_token_ids: token id {wrong} is not in the model's vocabulary, ids are 0 to "
            f"{self._vocab_size - 1}",
            param=name,
        )


def allowed_token_ids(params: SamplingParams) -> LogitsProcessor | None:
    """Return the processor, or None where every token is allowed."""
    allowed = params.options.get(name)
    if not allowed:
        return None

    import torch

    ids = torch.tensor(allowed, dtype=torch.int64)

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        kept = logits[ids]
        logits.fill_(float("-inf"))
        logits[ids] = kept
        return logits

    return process


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the option, the check and the processor."""
    registrar.request_option(name, AllowedTokenIds)
    registrar.input_processor(name, AllowedCheck)
    registrar.logits_processor(name, allowed_token_ids)
