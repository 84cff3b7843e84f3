"""`SamplingParams`: what a request asks of the sampler, with vLLM's names and defaults."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.core.errors import RequestError
from headrace.core.logprobs import LogprobsMode

__all__ = ["SamplingParams", "request_error"]

MAX_STOP_STRINGS = 256
INT64 = 2**63


class SamplingParams(BaseModel):
    """Frozen; one object may serve many calls.

    A keyword that is not a field is kept and looked up among the request options that the engine's plugins
    registered when the request is made; it is refused there, with the nearest known name, if nobody knows it.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    n: int = Field(1, ge=1, le=16384)
    """Answers for one prompt; child i draws with `seed + i`."""
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    """0 is greedy: top_k, top_p and min_p have no effect then."""
    top_k: int = Field(0, ge=-1, lt=INT64)
    """0 or -1: off."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Relative to the probability of the likeliest token."""
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Over generated tokens only, as is `frequency_penalty`."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Over prompt and output: divides positive logits, multiplies negative ones."""
    logit_bias: dict[int, float] | None = None
    """Added to logits; beyond ±100 it is clamped."""
    max_tokens: int | None = Field(16, ge=0, lt=INT64)
    """None: up to the end of the context. 0: the prompt is computed and nothing drawn (with `prompt_logprobs`, or an
    option of a plugin that wants what the forward pass makes of it)."""
    min_tokens: int = Field(0, ge=0, lt=INT64)
    """Until then neither end tokens nor stop strings end the request."""
    stop: list[str] = Field(default_factory=list, max_length=MAX_STOP_STRINGS)
    """A string or a list of strings."""
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=-1)
    """Candidates a generated token, the chosen one besides; -1: the whole vocabulary."""
    prompt_logprobs: int | None = Field(None, ge=-1)
    logprob_token_ids: list[int] | None = Field(None, min_length=1, max_length=128)
    """Told with every generated token, besides the likeliest ones; `logprobs` is 0 where it is not set."""
    logprobs_mode: LogprobsMode | None = None
    """None: the engine's option of this name."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    """Shown special tokens that follow each other are a space apart; text is the tokens' own otherwise."""

    def __init__(self, **fields: Any) -> None:
        if fields.get("logprob_token_ids") and fields.get("logprobs") is None:
            fields["logprobs"] = 0
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise request_error(error) from None

    @field_validator("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a number")
        return value

    @field_validator("temperature")
    @classmethod
    def _tiny_temperature(cls, value: float) -> float:
        # Below 0.01 the division overflows float32 logits; the field's custom is to raise it.
        return 0.01 if 0 < value < 0.01 else value

    @field_validator("seed")
    @classmethod
    def _unset_seed(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        if value is None:
            return []
        if isinstance(value, str):
            value = [value]
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, list) and any(isinstance(item, str) and not item for item in value):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _stop_ids(cls, value: Any) -> Any:
        return [] if value is None else list(value) if isinstance(value, (tuple, set, frozenset)) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        bias: dict[int, float] = {}
        for key, amount in value.items():
            if isinstance(key, str) and key.lstrip("-").isdecimal():
                key = int(key)  # JSON has no integer keys
            if isinstance(key, bool) or not isinstance(key, int):
                raise ValueError(f"a key must be a token id, got {key!r}")
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or math.isnan(amount):
                raise ValueError(f"the bias of token {key} must be a number, got {amount!r}")
            bias[key] = max(-100.0, min(100.0, float(amount)))
        return bias

    @model_validator(mode="after")
    def _combinations(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.max_tokens == 0 and self.prompt_logprobs is None and not self.model_extra:
            raise ValueError(
                "max_tokens 0 gives nothing: it must be at least 1, or prompt_logprobs must be set"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids otherwise")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} with temperature 0 would give the same answer {self.n} times; use n=1"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that are no field of core's: options of plugins."""
        return dict(self.model_extra or {})


def request_error(error: ValidationError) -> RequestError:
    """Turn pydantic's report on a request's fields into one line that names field, value and what is allowed."""
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    text = first["msg"].removeprefix("Value error, ")
    value = "" if param is None else f", got {first['input']!r:.100}"
    return RequestError(f"{param + ': ' if param else ''}{text}{value}", param=param)
