"""`logit_bias`: +100 forces, -100 bans, an id the model does not have is refused by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from headrace.core.errors import RequestError
from headrace.core.interfaces import LogitsRow, ProcessedInput
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins import logit_bias as plugin

V = 50


def apply(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    processor = plugin.logit_bias(params)
    assert processor is not None
    return processor(LogitsRow("r", params, Stash(), 1, 1, [0], 1), logits.clone())


def check(bias: Any) -> None:
    item = ProcessedInput("hi", SamplingParams(logit_bias=bias), Stash())
    plugin.BiasCheck(types.SimpleNamespace(vocab_size=V)).process(item)  # type: ignore[arg-type]


def test_bias_is_added() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0))
    bias = {3: 1.5, 49: -2.0, 0: 0.25}
    got = apply(SamplingParams(logit_bias=bias), logits)
    for i in range(V):
        assert got[i].item() == pytest.approx(logits[i].item() + bias.get(i, 0.0))


def test_a_hundred_forces_and_bans_even_greedy() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 5
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert int(apply(SamplingParams(logit_bias={worst: 100.0}), logits).argmax()) == worst
    assert int(apply(SamplingParams(logit_bias={best: -100.0}), logits).argmax()) != best
    assert torch.equal(
        apply(SamplingParams(logit_bias={5: 1000}), logits),
        apply(SamplingParams(logit_bias={5: 100.0}), logits),
    )


def test_no_bias_asks_for_nothing() -> None:
    assert plugin.logit_bias(SamplingParams()) is None
    assert plugin.logit_bias(SamplingParams(logit_bias={})) is None


@pytest.mark.parametrize("token_id", [V, V + 900, -1, str(V), "-1", 2**70])
def test_an_id_outside_the_vocabulary_is_refused(token_id: Any) -> None:
    """Source: vllm-project/vllm PR#16529, vllm-project/vllm#6866, sgl-project/sglang#7670"""
    with pytest.raises(RequestError, match=rf"logit_bias: token id {token_id} .* 0 to 49") as caught:
        check({token_id: 5, 3: 1})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("bias", [{"abc": 1}, {"5": "x"}, {"5": True}, {1.5: 1}])
def test_what_is_no_bias_is_refused_at_once(bias: Any) -> None:
    """Source: vllm-project/vllm PR#16529, vllm-project/vllm#6866, sgl-project/sglang#7670"""
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_ids_inside_pass() -> None:
    check({0: 1, V - 1: -1, "5": 1000})
    check(None)


def test_registers_both_halves() -> None:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    assert [entry.factory for entry in registry.entries("logits_processor")] == [plugin.logit_bias]
    assert [entry.factory for entry in registry.entries("input_processor")] == [plugin.BiasCheck]
