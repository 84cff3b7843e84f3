"""`allowed_token_ids`: nothing else is drawn, whatever a bias or a penalty says."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from headrace.configuration import request_options
from headrace.core.errors import RequestError
from headrace.core.interfaces import LogitsRow, ProcessedInput
from headrace.core.plan import NewRequest
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.sampler import Sampler
from headrace.plugins import allowed_token_ids as plugin
from headrace.plugins.logit_bias import logit_bias
from headrace.plugins.penalties import penalties

V = 50


def registry() -> Registry:
    made = Registry()
    plugin.headrace_register(Registrar(made, plugin.name), None)
    return made


def check(ids: list[int]) -> None:
    item = ProcessedInput("hi", SamplingParams(allowed_token_ids=ids), Stash())
    plugin.AllowedCheck(types.SimpleNamespace(vocab_size=V)).process(item)  # type: ignore[arg-type]


def drawn(params: SamplingParams, logits: torch.Tensor) -> int:
    processors = [
        ("allowed_token_ids", plugin.allowed_token_ids, "p"),
        ("logit_bias", logit_bias, "p"),
        ("penalties", penalties, "p"),
    ]
    sampler = Sampler(processors, [], V)
    row = LogitsRow("r", params, Stash(), 2, 3, [1, 2, 3], 3)
    sampler.add(
        NewRequest(
            request_id="r", token_ids=[1, 2, 3], num_prompt_tokens=2, params=params, start=0, count=3,
            block_ids=[[1]],
        )
    )  # fmt: skip
    (sampled,) = sampler.sample([row], logits.clone()[None])
    assert sampled.error is None
    return sampled.token_id


def test_others_are_masked_and_these_stay_as_they_are() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(allowed_token_ids=[7, 3, 7, 49])
    processor = plugin.allowed_token_ids(params)
    assert processor is not None
    got = processor(LogitsRow("r", params, Stash(), 1, 1, [0], 1), logits.clone())
    assert {i for i in range(V) if got[i] > -torch.inf} == {3, 7, 49}
    assert torch.equal(got[[3, 7, 49]], logits[[3, 7, 49]])


def test_only_these_are_drawn_greedy_and_not() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 3
    allowed = [2, 11, 23, 42]
    best = max(allowed, key=lambda i: float(logits[i]))
    assert drawn(SamplingParams(temperature=0.0, allowed_token_ids=allowed), logits) == best
    seen = {
        drawn(SamplingParams(temperature=2.0, seed=i, allowed_token_ids=allowed), logits) for i in range(200)
    }
    assert seen == set(allowed)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {5: 100.0}},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"repetition_penalty": 0.01},
        {"logit_bias": {9: -100.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_list_wins(fields: dict[str, Any], temperature: float) -> None:
    """Over a bias that forces another token, and over one that bans the only token left."""
    params = SamplingParams(temperature=temperature, seed=1, allowed_token_ids=[9], **fields)
    assert drawn(params, torch.zeros(V)) == 9


def test_no_list_asks_for_nothing() -> None:
    assert plugin.allowed_token_ids(SamplingParams()) is None


@pytest.mark.parametrize("token_id", [V, V + 900, -1, 2**70])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {token_id} .* 0 to 49") as caught:
        check([3, token_id])
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize("given", [[], "5", 5, [1.5], ["5"], [True], [None], {"5": 1}])
def test_what_is_no_list_of_ids_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        request_options(registry(), SamplingParams(allowed_token_ids=given))


def test_ids_inside_pass() -> None:
    request_options(registry(), SamplingParams(allowed_token_ids=[0, V - 1]))
    check([0, V - 1])


def test_registers_its_parts() -> None:
    made = registry()
    assert made.names("request_option") == ["allowed_token_ids"]
    assert [entry.factory for entry in made.entries("logits_processor")] == [plugin.allowed_token_ids]
    assert [entry.factory for entry in made.entries("input_processor")] == [plugin.AllowedCheck]
