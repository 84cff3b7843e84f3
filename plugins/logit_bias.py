"""`logit_bias`: a number added to the logits of chosen tokens; +100 forces a token, -100 bans it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.errors import RequestError
from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar
    from headrace.core.sampling_params import SamplingParams

__all__ = ["BiasCheck", "headrace_api", "headrace_register", "logit_bias", "name"]

name = "logit_bias"
headrace_api = ">=1,<2"


class BiasCheck:
    """Input processor: refuses a bias on an id that the model does not have."""

    name = "logit_bias"

    def __init__(self, context: FrontContext) -> None:
        self._vocab_size = context.vocab_size

    def process(self, item: ProcessedInput) -> None:
        """Raise `RequestError` naming the id and the range."""
        for token_id in item.params.logit_bias or {}:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"logit_bias: token id {token_id} is not in the model's vocabulary, ids are 0 to "
                    f"{self._vocab_size - 1}",
                    param="logit_bias",
                )


def logit_bias(params: SamplingParams) -> LogitsProcessor | None:
    """Return the processor, or None without a bias."""
    if not params.logit_bias:
        return None

    import torch

    ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
    amounts = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        logits[ids] += amounts
        return logits

    return process


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the check and the processor."""
    registrar.input_processor(name, BiasCheck)
    registrar.logits_processor(name, logit_bias)
