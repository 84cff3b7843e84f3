"""Repetition, presence and frequency penalties.

`repetition_penalty` r looks at prompt and output: the logit of a token seen there is divided by r if positive,
multiplied by r if not. `frequency_penalty` f and `presence_penalty` p look at generated tokens only: one that
occurred c > 0 times loses f · c + p. Both count every token before the row's position, unconfirmed drafts too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces import LogitsProcessor, LogitsRow
    from headrace.core.plugin.registry import Registrar
    from headrace.core.sampling_params import SamplingParams

__all__ = ["headrace_api", "headrace_register", "name", "penalties"]

name = "penalties"
headrace_api = ">=1,<2"


def penalties(params: SamplingParams) -> LogitsProcessor | None:
    """Return the processor, or None where all three are neutral."""
    repetition = params.repetition_penalty
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if repetition == 1 and presence == 0 and frequency == 0:
        return None

    import numpy as np

    # Beyond what float32 holds it would be 0 or infinite there, and make NaN of a masked token's -inf or of a 0.
    limits = np.finfo(np.float32)
    repetition = min(max(repetition, float(limits.tiny)), float(limits.max))

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        values = logits.numpy()
        if repetition != 1:
            # A token that was seen twice is written twice, alike: sorting them out would take longer.
            seen = np.asarray(row.tokens, np.int64)
            own = values[seen]
            with np.errstate(over="ignore"):
                values[seen] = np.where(own > 0, own / repetition, own * repetition)
        generated = row.tokens[row.num_prompt_tokens :]
        if (presence or frequency) and len(generated):
            seen, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
            values[seen] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)
        return logits

    return process


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the processor."""
    registrar.logits_processor(name, penalties)
