"""Sampling defaults that come with a model (generation_config.json), under what a request sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import RequestError
from headrace.core.sampling_params import SamplingParams

__all__ = ["GenerationDefaults"]

FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's word → ours."""

SILENT = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "do_sample",
        "eos_token_id",
        "max_length",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that are no sampling defaults, or used elsewhere. `do_sample` is passed over, as other servers do: a
request that wants the likeliest token says temperature 0."""


class GenerationDefaults:
    """A model's own defaults. A request's explicit value wins, also where it is the neutral one."""

    def __init__(self, generation_config: Mapping[str, Any]) -> None:
        self._defaults: dict[str, Any] = {}
        self._refused: list[str] = []
        for theirs, value in generation_config.items():
            if theirs in SILENT or value is None:
                continue
            ours = FIELDS.get(theirs)
            if ours is None:
                self._refused.append(theirs)
                continue
            try:
                SamplingParams(**{ours: value})
            except RequestError:
                self._refused.append(f"{theirs} {value!r}")
            else:
                self._defaults[ours] = value

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the model's defaults where the request set nothing.

        A default that does not go with what the request set is left out.
        """
        missing = {
            name: value for name, value in self._defaults.items() if name not in params.model_fields_set
        }
        if missing.get("max_tokens", params.min_tokens) < params.min_tokens:
            del missing["max_tokens"]
        if params.n > 1 and missing.get("temperature") == 0:
            del missing["temperature"]
        return params.model_copy(update=missing) if missing else params

    def notes(self) -> list[str]:
        """Lines for the start-up report."""
        lines = []
        if self._defaults:
            told = ", ".join(f"{name} {value}" for name, value in self._defaults.items())
            lines.append(
                f"the model's own sampling defaults apply: {told} (generation_config none leaves them out)"
            )
        if self._refused:
            lines.append(
                f"the model's generation_config has fields not used here: {', '.join(self._refused)}"
            )
        return lines
