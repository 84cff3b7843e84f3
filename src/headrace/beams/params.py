"""`BeamSearchParams`: what a beam search is asked for, with vLLM's names."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.core.sampling_params import request_error

__all__ = ["BeamSearchParams"]


class BeamSearchParams(BaseModel):
    """Frozen; one object may serve many calls. Raises `RequestError` for a value that is not allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    beam_width: int = Field(ge=1, le=1024)
    """Beginnings that are followed at once, and answers that come back."""
    max_tokens: int | None = Field(16, ge=1)
    """None: up to the end of the context."""
    ignore_eos: bool = False
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    """Log-probabilities are those of logits / temperature; 0 is the model's own distribution, as is 1."""
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0)
    """An answer's score is the sum of its log-probabilities / (number of its tokens) ** length_penalty."""
    include_stop_str_in_output: bool = False
    """Show the end token in the text."""
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0)
    """Candidates to tell with each token, the token itself besides."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise request_error(error) from None

    def score(self, logprob: float, num_tokens: int) -> float:
        """Return what answers are ordered by; the end token counts. logprob: the sum over all tokens."""
        return logprob / math.pow(num_tokens, self.length_penalty)
