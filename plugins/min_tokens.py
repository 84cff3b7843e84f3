"""`min_tokens`: until so many tokens are generated, those that would end the request cannot be drawn.

Masked are `stop_token_ids` and the model's end tokens; under `ignore_eos` the latter end nothing and are
ordinary tokens, so they stay. The front end, which knows the model's end tokens, sends them along in the stash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.stash import StashKey

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar
    from headrace.core.sampling_params import SamplingParams

__all__ = ["EOS_TOKEN_IDS", "EndTokens", "headrace_api", "headrace_register", "min_tokens", "name"]

name = "min_tokens"
headrace_api = ">=1,<2"

EOS_TOKEN_IDS: StashKey[list[int]] = StashKey("min_tokens/eos_token_ids", list[int], direction="request")


class EndTokens:
    """Input processor: notes the model's end tokens on requests that will have to avoid them."""

    name = "min_tokens"

    def __init__(self, context: FrontContext) -> None:
        self._ids = list(context.eos_token_ids)

    def process(self, item: ProcessedInput) -> None:
        """Fill the stash where `min_tokens` is set and the end tokens count."""
        if item.params.min_tokens > 0 and not item.params.ignore_eos:
            item.stash[EOS_TOKEN_IDS] = list(self._ids)


def min_tokens(params: SamplingParams) -> LogitsProcessor | None:
    """Return the processor, or None where `min_tokens` is 0."""
    if params.min_tokens == 0:
        return None

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        if row.position - row.num_prompt_tokens < params.min_tokens:
            eos = [] if params.ignore_eos else row.stash.get(EOS_TOKEN_IDS) or []
            # A tokenizer may know more ids than the model has rows for; those cannot be drawn anyway.
            ids = [i for i in {*params.stop_token_ids, *eos} if 0 <= i < logits.shape[0]]
            logits[ids] = float("-inf")
        return logits

    return process


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register both halves and what travels between them."""
    registrar.stash_key(EOS_TOKEN_IDS)
    registrar.input_processor(name, EndTokens)
    registrar.logits_processor(name, min_tokens)
