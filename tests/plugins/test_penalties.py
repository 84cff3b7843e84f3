"""Penalties against naive loops over lists."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.core.interfaces import LogitsRow
from headrace.core.plan import NewRequest
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.sampler import Sampler
from headrace.plugins import penalties as plugin

V = 40


def row(params: SamplingParams, tokens: list[int], prompt: int, request_id: str = "r") -> LogitsRow:
    return LogitsRow(request_id, params, Stash(), prompt, len(tokens), tokens, len(tokens))


def apply(params: SamplingParams, logits: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
    processor = plugin.penalties(params)
    assert processor is not None
    return processor(row(params, tokens, prompt), logits.clone())


def naive(params: SamplingParams, logits: list[float], tokens: list[int], prompt: int) -> list[float]:
    result = list(logits)
    for i in range(len(result)):
        if i in tokens:
            r = params.repetition_penalty
            result[i] = result[i] / r if result[i] > 0 else result[i] * r
        count = tokens[prompt:].count(i)
        result[i] -= params.frequency_penalty * count
        if count:
            result[i] -= params.presence_penalty
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -0.3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.9},
    ],
)
def test_equals_a_naive_loop(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    random.seed(0)
    for length, prompt in [(1, 1), (5, 5), (6, 5), (30, 10), (300, 3)]:
        tokens = [random.randrange(V) for _ in range(length)]
        logits = torch.randn(V, generator=torch.Generator().manual_seed(length)) * 4
        got = apply(params, logits, tokens, prompt)
        assert got.tolist() == pytest.approx(naive(params, logits.tolist(), tokens, prompt), abs=1e-4)
        if length > prompt:
            assert not torch.equal(got, logits), "something was penalized"


def test_neutral_values_ask_for_nothing() -> None:
    assert plugin.penalties(SamplingParams()) is None
    assert plugin.penalties(SamplingParams(temperature=0.0, max_tokens=3, logit_bias={1: 2.0})) is None


def test_what_counts_is_prompt_for_repetition_and_output_for_the_others() -> None:
    """A prompt of 20 times one id. Source: vllm-project/vllm-metal PR#69; NVIDIA/TensorRT-LLM PR#5623"""
    t = 7
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    logits[t] = 3.0
    prompt = [t] * 20
    for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert torch.equal(apply(SamplingParams(**fields), logits, prompt, 20), logits)
    repetition = apply(SamplingParams(repetition_penalty=1.5), logits, prompt, 20)
    assert repetition[t].item() == pytest.approx(2.0)
    assert repetition.log_softmax(-1)[t] < logits.log_softmax(-1)[t]
    others = torch.arange(V) != t
    assert torch.equal(repetition[others], logits[others])


def test_the_kth_repeat_costs_k_times_the_frequency_penalty() -> None:
    """In the long run too. Source: vllm-project/vllm-metal PR#69; NVIDIA/TensorRT-LLM PR#5623"""
    params = SamplingParams(frequency_penalty=2.0, max_tokens=30)
    logits = torch.linspace(-1, 1, V)
    for k in range(30):
        got = apply(params, logits, [7] * 20 + [9] * k, 20)
        assert got[9].item() == pytest.approx(logits[9].item() - 2 * k)
        assert got[7] == logits[7]


def test_a_function_of_the_row_and_nothing_else() -> None:
    """Rows may go back (rejected drafts, preemption) or skip: one processor, any order, the same numbers."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    processor = plugin.penalties(params)
    assert processor is not None
    logits = torch.randn(V, generator=torch.Generator().manual_seed(2))
    tokens = [random.Random(1).randrange(V) for _ in range(50)]
    ends = [10, 30, 12, 50, 10, 11, 49, 30]
    got = [processor(row(params, tokens[:end], 10), logits.clone()) for end in ends]
    for end, values in zip(ends, got, strict=True):
        assert torch.equal(values, apply(params, logits, tokens[:end], 10))
    drafts = LogitsRow("r", params, Stash(), 10, 13, tokens[:13], 11)
    assert torch.equal(processor(drafts, logits.clone()), apply(params, logits, tokens[:13], 10))


def test_one_request_with_a_penalty_leaves_its_neighbours_alone() -> None:
    """8 requests that come and go, two with penalties. Source: vllm-project/vllm#28307"""
    penalties = {2: {"repetition_penalty": 1.3}, 5: {"presence_penalty": -1.5}}
    params = [SamplingParams(seed=i, temperature=0.8, **penalties.get(i, {})) for i in range(8)]

    def run(members: list[int]) -> dict[int, list[int]]:
        sampler = Sampler([("penalties", plugin.penalties, "penalties")], [], V)
        tokens = {i: [i, i + 1] for i in members}
        for step in range(20):
            live = [i for i in members if i <= step < i + 10]
            for i in live:
                if step == i:
                    sampler.add(
                        NewRequest(
                            request_id=f"r{i}",
                            token_ids=tokens[i],
                            num_prompt_tokens=2,
                            params=params[i],
                            start=0,
                            count=2,
                            block_ids=[[1]],
                        )
                    )
            rows = [row(params[i], tokens[i], 2, f"r{i}") for i in live]
            logits = (
                torch.stack(
                    [torch.randn(V, generator=torch.Generator().manual_seed(100 * i + step)) for i in live]
                )
                if live
                else torch.empty(0, V)
            )
            for i, sampled in zip(live, sampler.sample(rows, logits), strict=True):
                assert sampled.error is None
                tokens[i] = [*tokens[i], sampled.token_id]
                if len(tokens[i]) == 12:
                    sampler.remove(f"r{i}")
        return tokens

    together = run(list(range(8)))
    assert all(len(tokens) == 12 for tokens in together.values())
    for i in range(8):
        assert run([i])[i] == together[i]


def test_registers_one_processor() -> None:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    assert [entry.factory for entry in registry.entries("logits_processor")] == [plugin.penalties]
    assert registry.names("logits_processor") == ["penalties"]


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-30, 1e30, 1e39, 1.7e308])
def test_an_extreme_penalty_makes_no_nan(penalty: float) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3))
    logits[:4] = torch.tensor([-torch.inf, 0.0, 2.0, -2.0])
    got = apply(SamplingParams(repetition_penalty=penalty), logits, list(range(8)), 4)
    assert not got.isnan().any()
    assert got[0] == -torch.inf
    assert got[1] == 0.0
    assert (got[2] > got[4:].max()) == (penalty < 1)
    assert torch.equal(got[8:], logits[8:])
