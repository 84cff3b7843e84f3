"""Beam searches over HTTP: `use_beam_search` in a body of either compute route."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.async_llm import AsyncLLM
from headrace.beams import BeamRequest, BeamSearchParams
from headrace.core.sampling_params import SamplingParams
from headrace.outputs import RequestOutput
from headrace.server.errors import ApiError
from headrace.server.protocol import Body
from headrace.server.runs import Run

__all__ = ["BeamRun", "beam_params", "single"]

TAKEN = frozenset(
    {
        "ignore_eos",
        "include_stop_str_in_output",
        "logprobs",
        "max_tokens",
        "n",
        "seed",
        "skip_special_tokens",
        "temperature",
    }
)
"""Fields of `SamplingParams` that go with a beam search; it draws nothing, so a seed changes nothing."""


def single(body: Body, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampler's fields without `n`, which is a width here; all of them where no search is asked for.

    Raises `ApiError` where a field of the body is for beam searches alone.
    """
    if body.use_beam_search:
        return {name: value for name, value in sampling.items() if name != "n"}
    if body.length_penalty != 1.0:
        raise ApiError(400, "length_penalty needs use_beam_search: true", param="length_penalty")
    return dict(sampling)


def beam_params(body: Body, params: SamplingParams, width: Any) -> BeamSearchParams:
    """Return what a search is asked for. Raises `ApiError` and `RequestError` for what does not go with one.

    params: what the request would ask of the sampler. width: its `n`.
    """
    if body.stream:
        raise ApiError(
            400,
            "stream: an answer of use_beam_search is known at its end only, so it cannot be streamed",
            param="stream",
        )
    if getattr(body, "best_of", None) not in (None, width):
        raise ApiError(400, "best_of must equal n in a beam search, or be left out", param="best_of")
    neutral = SamplingParams()
    given = [
        name for name in params.model_fields_set if getattr(params, name) != getattr(neutral, name, None)
    ]
    for name in given:
        if name not in TAKEN:
            raise ApiError(
                400,
                f"{name} does not go with use_beam_search, which looks for the model's likeliest answers; leave it "
                f"out. These do: {', '.join(sorted(TAKEN))}, length_penalty",
                param=name,
            )
    return BeamSearchParams(
        beam_width=width,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
    )


class BeamRun:
    """One search a prompt, as `Run` is one engine request a prompt. Used on the engine's event loop."""

    def __init__(self, engine: AsyncLLM, searches: Sequence[BeamRequest]) -> None:
        self._engine = engine
        self._searches = searches
        self._steps: dict[BeamRequest, Run] = {}

    def submit(self) -> None:
        """Each step is handed to the engine when the one before is known."""

    @property
    def num_prompts(self) -> int:
        """Searches."""
        return len(self._searches)

    @property
    def outputs(self) -> dict[int, RequestOutput]:
        """What came so far, by the number of the prompt."""
        return {place: search.output for place, search in enumerate(self._searches)}

    async def finish(self) -> list[RequestOutput]:
        """Search to the end, and return what was found, by prompt. Raises `ApiError` for a step that failed."""
        await asyncio.gather(*map(self._search, self._searches))
        return [search.output for search in self._searches]

    async def _search(self, search: BeamRequest) -> None:
        while not search.is_over:
            step = self._steps[search] = Run(self._engine, search.requests())
            try:
                step.submit()
                search.take(await step.finish())
            finally:
                step.abort()

    def abort(self) -> None:
        """End what is not finished."""
        for step in self._steps.values():
            step.abort()
