"""Drafts by prompt lookup on the real model: ids are those of the plain run, and repetitive prompts go faster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.weights

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "show_report": False}
REPETITIVE = [[7] * 3, [7, 8] * 20, [100 + 3 * i for i in range(20)] * 2]
COUNTING = " one two three four five" * 8
PLAIN = ["The capital of France is", "Water boils at", "def fibonacci(n):\n    ", "Once upon a time", "x"]


def start(count: int = 5, **speculative: Any) -> LLM:
    asked = {"method": "ngram", "num_speculative_tokens": count, "adaptive": False, **speculative}
    return LLM("smollm2", speculative=asked, **OPTIONS)


def ids(llm: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("smollm2", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with start() as llm:
        yield llm


@pytest.mark.parametrize(("count", "at_once"), [(1, 8), (3, 1), (5, 8)])
def test_greedy_answers_are_the_same(plain: LLM, count: int, at_once: int) -> None:
    """Sources: vllm-project/vllm#41758, ohdearquant/lattice#243."""
    prompts = [*REPETITIVE, *PLAIN] if at_once > 1 else [*REPETITIVE[:2], PLAIN[1]]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with start(count) as llm:
        for first in range(0, len(prompts), at_once):
            part = prompts[first : first + at_once]
            assert ids(llm, part, params) == ids(plain, part, params)
        accepted = llm.metrics()["spec_decode_num_accepted_tokens"]
        ids(llm, REPETITIVE, params)
        assert llm.metrics()["spec_decode_num_accepted_tokens"] > accepted + 20


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 1, "min_p": 0.3},
        {"temperature": 0, "logit_bias": {5000: 100.0}},
        {"temperature": 0, "min_tokens": 10, "stop_token_ids": [28, 30]},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 0, "logit_bias": {28: -100.0, 30: -100.0}},
    ],
    ids=lambda fields: ", ".join(list(fields)[-1:]),
)
def test_parameters_work_as_without(plain: LLM, drafting: LLM, fields: dict[str, Any]) -> None:
    """Source: vllm-project/vllm#31982."""
    params = SamplingParams(**{"max_tokens": 32, "ignore_eos": True, **fields})
    prompts = [REPETITIVE[1], PLAIN[0]]
    got = ids(drafting, prompts, params)
    assert got == ids(plain, prompts, params)
    if fields.get("logit_bias", {}).get(5000):
        assert got[0] == [5000] * 32
    if "min_tokens" in fields:
        assert all(len(answer) >= 10 for answer in got)


def test_ids_end_where_the_text_ends(plain: LLM, drafting: LLM) -> None:
    """Source: vllm-project/vllm#47616."""
    prompt = COUNTING
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    stop = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, stop=["three f"])
    before = drafting.metrics()["spec_decode_num_accepted_tokens"]
    (whole,) = drafting.generate(prompt, free, use_tqdm=False)
    assert drafting.metrics()["spec_decode_num_accepted_tokens"] > before + 20
    for llm in (drafting, plain):
        (output,) = llm.generate(prompt, stop, use_tqdm=False)
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.text == whole.outputs[0].text[: whole.outputs[0].text.index("three f")]
        count = len(answer.token_ids)
        assert count < 10
        assert answer.token_ids == whole.outputs[0].token_ids[:count]
        assert answer.logprobs == (whole.outputs[0].logprobs or [])[:count]


def test_streams_in_a_process_of_its_own(plain: LLM) -> None:
    prompt, params = COUNTING, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def stream() -> tuple[list[list[int]], Any]:
        # An adaptive one drafts less where a machine that stood still made drafts look dear.
        asked = {"method": "ngram", "adaptive": False}
        async with await AsyncLLM.start("smollm2", speculative=asked, **OPTIONS) as llm:
            seen = [list(o.outputs[0].token_ids) async for o in llm.generate(prompt, params)]
            return seen, await llm.metrics()

    seen, metrics = asyncio.run(stream())
    assert [seen[-1]] == ids(plain, [prompt], params)
    assert len(seen) < 30  # several tokens come at once
    assert metrics["spec_decode_num_accepted_tokens"] > 10
