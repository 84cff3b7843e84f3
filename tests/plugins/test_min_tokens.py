"""`min_tokens`: tokens that would end the request cannot be drawn before it."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch

from headrace.core.interfaces import LogitsRow, ProcessedInput
from headrace.core.plan import NewRequest
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.sampler import Sampler
from headrace.plugins import min_tokens as plugin
from headrace.plugins.logit_bias import logit_bias

V = 50


def make_stash(params: SamplingParams, eos: tuple[int, ...] | None = (2, 6)) -> Stash:
    """What the front end sends along."""
    item = ProcessedInput("hi", params, Stash())
    plugin.EndTokens(types.SimpleNamespace(eos_token_ids=eos or ())).process(item)  # type: ignore[arg-type]
    return item.stash


def masked(params: SamplingParams, generated: int, eos: tuple[int, ...] | None = (2, 6)) -> set[int]:
    processor = plugin.min_tokens(params)
    assert processor is not None
    tokens = [1] * (4 + generated)
    row = LogitsRow("r", params, make_stash(params, eos), 4, len(tokens), tokens, len(tokens))
    got = processor(row, torch.zeros(V))
    assert set(got.tolist()) <= {0.0, -math.inf}
    return {i for i in range(V) if got[i] == -math.inf}


def test_masks_end_tokens_until_enough() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[9])
    assert [masked(params, generated) for generated in range(5)] == [{2, 6, 9}] * 3 + [set()] * 2


def test_ignore_eos_leaves_end_tokens_ordinary() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[9], ignore_eos=True)
    assert masked(params, 0) == {9}
    assert len(make_stash(params)) == 0


@pytest.mark.parametrize("eos", [None, ()])
def test_without_end_tokens_there_is_nothing_to_mask(eos: Any) -> None:
    assert masked(SamplingParams(min_tokens=1), 0, eos) == set()
    assert masked(SamplingParams(min_tokens=1, stop_token_ids=[9]), 0, eos) == {9}


def test_end_tokens_beyond_the_models_rows_do_no_harm() -> None:
    assert masked(SamplingParams(min_tokens=1), 0, (2, V, V + 7)) == {2}


def test_zero_asks_for_nothing() -> None:
    assert plugin.min_tokens(SamplingParams()) is None
    assert len(make_stash(SamplingParams())) == 0


def test_a_forced_end_token_comes_exactly_then() -> None:
    """A bias that forces the end token, and min_tokens 5: five others first. Source: vllm-project/vllm#21987"""
    params = SamplingParams(temperature=0.0, min_tokens=5, logit_bias={2: 100.0})
    stash = make_stash(params)
    sampler = Sampler(
        [("min_tokens", plugin.min_tokens, "min_tokens"), ("logit_bias", logit_bias, "logit_bias")], [], V
    )
    tokens = [1, 1, 1]
    sampler.add(
        NewRequest(
            request_id="r", token_ids=tokens, num_prompt_tokens=3, params=params, start=0, count=3,
            block_ids=[[1]], stash=stash,
        )
    )  # fmt: skip
    for step in range(7):
        row = LogitsRow("r", params, stash, 3, len(tokens), list(tokens), len(tokens))
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(step))
        tokens.append(sampler.sample([row], logits)[0].token_id)
    assert 2 not in tokens[3:8]
    assert tokens[8:] == [2, 2]


def test_masking_everything_is_an_error_of_the_request() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=list(range(V)))
    sampler = Sampler([("min_tokens", plugin.min_tokens, "min_tokens")], [], V)
    row = LogitsRow("r", params, Stash(), 1, 1, [0], 1)
    sampler.add(
        NewRequest(
            request_id="r",
            token_ids=[0],
            num_prompt_tokens=1,
            params=params,
            start=0,
            count=1,
            block_ids=[[1]],
        )
    )
    assert "no token can be chosen" in (sampler.sample([row], torch.zeros(1, V))[0].error or "")


def test_registers_both_halves_and_the_key() -> None:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    assert [entry.factory for entry in registry.entries("logits_processor")] == [plugin.min_tokens]
    assert [entry.factory for entry in registry.entries("input_processor")] == [plugin.EndTokens]
    assert list(registry.stash_keys) == [plugin.EOS_TOKEN_IDS]
    stash = make_stash(SamplingParams(min_tokens=1))
    assert registry.stash_keys.from_wire(stash.to_wire()) == stash
