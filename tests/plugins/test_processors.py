"""`processors`: selected by name with parameters, checked before anything runs, run in order of registration."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from headrace.configuration import request_options
from headrace.core.errors import RequestError
from headrace.core.interfaces import LogitsRow, ProcessedInput
from headrace.core.plan import NewRequest
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.sampler import Sampler
from headrace.plugins import processors as plugin

V = 20


class Force(BaseModel):
    """Parameters of a processor that forces a token from the n-th on."""

    model_config = ConfigDict(extra="forbid")

    token_id: int
    start: int = Field(0, ge=0)


def force(params: SamplingParams, parameters: Force) -> Any:
    assert isinstance(parameters, Force)

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        if row.position - row.num_prompt_tokens >= parameters.start:
            logits[parameters.token_id] = 100.0
        return logits

    return process


class Nothing(BaseModel):
    """No parameters."""


def double(params: SamplingParams, parameters: Nothing) -> Any:
    return lambda row, logits: logits * 2


def always(params: SamplingParams) -> Any:
    return lambda row, logits: logits + 1


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    plugin.headrace_register(Registrar(made, plugin.name), None)
    mine = Registrar(made, "mine")
    mine.logits_processor("always", always)
    mine.logits_processor("force", force, parameters=Force)
    mine.logits_processor("double", double, parameters=Nothing)
    return made


def check(registry: Registry, selected: Any) -> None:
    params = SamplingParams(processors=selected)
    request_options(registry, params)
    context: Any = types.SimpleNamespace(registry=registry)
    plugin.SelectionCheck(context).process(ProcessedInput("hi", params, Stash()))


def processed(registry: Registry, logits: torch.Tensor, **fields: Any) -> int:
    """The token drawn behind [1, 2, 3], of which one is generated."""
    params = SamplingParams(temperature=0.0, **fields)
    entries = registry.entries("logits_processor")
    sampler = Sampler([(entry.name, entry.factory, entry.plugin) for entry in entries], [], V)
    request = NewRequest(
        request_id="r",
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        params=params,
        start=0,
        count=3,
        block_ids=[[1]],
    )
    sampler.add(request)
    (sampled,) = sampler.sample([LogitsRow("r", params, Stash(), 2, 3, [1, 2, 3], 3)], logits[None])
    assert sampled.error is None
    return sampled.token_id


def test_a_request_selects_with_parameters(registry: Registry) -> None:
    assert processed(registry, torch.zeros(V)) == 0
    assert processed(registry, torch.zeros(V), processors={"force": {"token_id": 7}}) == 7
    assert processed(registry, torch.zeros(V), processors={"force": {"token_id": 7, "start": 1}}) == 7
    assert processed(registry, torch.zeros(V), processors={"force": {"token_id": 7, "start": 2}}) == 0


def test_they_run_in_order_of_registration(registry: Registry) -> None:
    """Not in that of the request: always, force, double, so that token 5 ends at (80 + 1) · 2 and 7 at 100 · 2."""
    logits = torch.zeros(V)
    logits[5] = 80.0
    selected = {"double": {}, "force": {"token_id": 7}}
    assert processed(registry, logits.clone(), processors=selected) == 7
    logits[5] = 120.0
    assert processed(registry, logits.clone(), processors=selected) == 5


def test_what_is_right_passes(registry: Registry) -> None:
    check(registry, {"force": {"token_id": 3}, "double": {}})
    check(registry, {})
    check(registry, None)


@pytest.mark.parametrize(
    ("selected", "text"),
    [
        ({"farce": {"token_id": 1}}, r"'farce' \(did you mean 'force'\?\); there are: force, double"),
        ({"always": {}}, "called 'always'.* there are: force, double"),
        ({"force": {}}, "processors.force.token_id: Field required"),
        ({"force": {"token_id": "x"}}, "processors.force.token_id: .* integer.* got 'x'"),
        (
            {"force": {"token_id": 1, "start": -1}},
            "processors.force.start: .* greater than or equal to 0, got -1",
        ),
        ({"force": {"token_id": 1, "stop": 1}}, "processors.force.stop: Extra inputs"),
        ({"force": {"token_id": 10**30}}, "processors.force: parameters must be plain values"),
        ({"double": {"x": NotImplemented}}, "processors.double: parameters must be plain values"),
        ({"force": None}, "processors.force: .* dictionary, got None"),
        ({"force": [1]}, "processors.force: .* dictionary"),
        (["force"], "processors: .* dictionary"),
        ("force", "processors: .* dictionary"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(registry: Registry, selected: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        check(registry, selected)
    assert caught.value.param == "processors"


def test_without_selectable_processors_there_are_none() -> None:
    made = Registry()
    plugin.headrace_register(Registrar(made, plugin.name), None)
    with pytest.raises(RequestError, match="'force'; there are: none"):
        check(made, {"force": {}})
