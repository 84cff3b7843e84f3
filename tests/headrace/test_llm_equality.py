"""The real model gives the reference's tokens, in every mode; and each test asserts that its mode happened."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.interfaces import LogitsRow, RunnerListener

pytestmark = pytest.mark.weights

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The following is a list of European countries and their capitals. " * 6 + "Germany:",
    "The following is a list of European countries and their capitals. " * 6 + "Spain:",
    "1 2 3 5 8 13",
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. " * 9,
)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def ids(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(TEXTS), GREEDY, use_tqdm=False)]


def make(*, max_model_len: int | None = 1024, **options: Any) -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=max_model_len, show_report=False, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    llm = make(num_kv_blocks=64)
    return [llm.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The reference's answers, computed here, never stored."""
    return [oracle.greedy(prompt, 32) for prompt in prompts]


@pytest.fixture
def same(oracle: Any, prompts: list[list[int]], expected: list[list[int]]) -> Iterator[Any]:
    """Compare answers with the reference's by the tie rule: at most one tie in eight prompts."""

    def compare(answers: Sequence[Sequence[int]]) -> None:
        ties = [
            oracle.tie_rule(prompt, got, right)
            for prompt, got, right in zip(prompts, answers, expected, strict=True)
        ]
        assert sum(tie is not None for tie in ties) <= 1

    yield compare
    gc.collect()


def test_default_options(same: Any) -> None:
    llm = make()
    same(ids(llm))
    assert llm.metrics()["iteration_requests_max"] >= 2


def test_chunked_prompts(same: Any) -> None:
    llm = make(max_num_batched_tokens=32, max_num_seqs=16)
    same(ids(llm))
    metrics = llm.metrics()
    assert metrics["iteration_tokens_total_sum"] / metrics["num_steps"] <= 32
    assert metrics["num_steps"] > 32 + 200 / 32  # a long prompt took several steps


def test_large_steps(same: Any) -> None:
    llm = make(max_num_batched_tokens=4096, max_num_seqs=16)
    same(ids(llm))
    assert llm.metrics()["num_steps"] <= 34  # two texts begin alike: one waits a step for what both share


def test_one_at_a_time(same: Any) -> None:
    llm = make(max_num_seqs=1, enable_prefix_caching=False)
    same(ids(llm))
    assert llm.metrics()["iteration_requests_max"] == 1


def test_prefix_cache_cold_and_warm(same: Any) -> None:
    llm = make(max_num_seqs=16)
    same(ids(llm))
    before = llm.metrics()["prefix_cache_hits"]
    outputs = llm.generate(list(TEXTS), GREEDY, use_tqdm=False)
    same([output.outputs[0].token_ids for output in outputs])
    assert llm.metrics()["prefix_cache_hits"] > before
    for output in outputs:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16


def test_prefix_cache_off(same: Any) -> None:
    llm = make(max_num_seqs=16, enable_prefix_caching=False)
    same(ids(llm))
    same(ids(llm))
    assert llm.metrics()["prefix_cache_hits"] == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted(same: Any, caching: bool) -> None:
    # One prompt and its answer take 14 of the 16 blocks; max_model_len follows from the pool.
    llm = make(max_model_len=None, num_kv_blocks=16, max_num_seqs=16, enable_prefix_caching=caching)
    answers = ids(llm)
    same(answers)
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"] == 16


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_block_sizes(same: Any, block_size: int) -> None:
    """Source: sgl-project/sglang#4602."""
    llm = make(block_size=block_size, num_kv_blocks=2048 // block_size)
    same(ids(llm))


def test_priority_policy(same: Any) -> None:
    llm = make(scheduling_policy="priority", max_num_seqs=2)
    outputs = llm.generate(list(TEXTS), GREEDY, priority=list(range(8))[::-1], use_tqdm=False)
    same([output.outputs[0].token_ids for output in outputs])
    finished = [output.metrics.finished_time or 0.0 for output in outputs]
    assert finished[7] < finished[0]


class LastLogits(RunnerListener):
    """Keeps the logits of the first token drawn for each request."""

    name = "last_logits"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], Any] = {}

    def on_logits(self, rows: Sequence[LogitsRow], logits: Any) -> None:
        for row, values in zip(rows, logits, strict=True):
            if len(row.tokens) == row.num_prompt_tokens:
                self.seen[tuple(int(token) for token in row.tokens)] = values.clone()


class LastLogitsPlugin:
    name = "last_logits"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.listener = LastLogits()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.runner_listener("last_logits", lambda context: self.listener)


@pytest.mark.parametrize("budget", [64, 4096])
def test_last_token_logits_are_within_1e_4(oracle: Any, prompts: list[list[int]], budget: int) -> None:
    plugin = LastLogitsPlugin()
    llm = make(plugins=[plugin], max_num_batched_tokens=budget)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(plugin.listener.seen) == len(prompts)
    for prompt in prompts:
        difference = (plugin.listener.seen[tuple(prompt)] - oracle.logits(prompt)[-1]).abs().max()
        assert float(difference) < 1e-4


def test_the_same_request_again_and_again(oracle: Any) -> None:
    """Source: ggml-org/llama.cpp#4902."""
    llm = make()
    system = "You are a helpful assistant that answers in one short sentence. " * 14
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Name a colour of the rainbow."},
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    for turn in range(12):
        if turn == 6:
            llm.generate(TEXTS[7] * 3, GREEDY, use_tqdm=False)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
    assert output.num_cached_tokens > 160
    prompt = output.prompt_token_ids
    for answer in answers[1:]:
        oracle.tie_rule(prompt, answer, answers[0])


def test_chats_share_the_system_text_in_the_cache() -> None:
    """Source: vllm-project/vllm#17954."""
    llm = make()
    system = {"role": "system", "content": "Answer briefly, please, and in plain words only. " * 32}
    params = SamplingParams(temperature=0, max_tokens=4)
    cached = []
    for question in ("Who are you?", "Who are you?", "What is rain?"):
        (output,) = llm.chat([system, {"role": "user", "content": question}], params, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    shared = len(llm.encode(system["content"])) // 16 * 16
    assert cached[0] == 0
    assert cached[1] >= shared - 16
    assert cached[2] >= shared - 16
    assert llm.metrics()["prefix_cache_hits"] > 0


@pytest.mark.parametrize("length", [63, 64, 65])
def test_a_prompt_of_whole_blocks_that_is_all_cached(oracle: Any, length: int) -> None:
    """Source: GeeeekExplorer/nano-vllm#144."""
    llm = make(num_kv_blocks=64)
    prompt = (llm.encode(TEXTS[7]) * 2)[:length]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, (length - 1) // 16 * 16]
    oracle.tie_rule(prompt, outputs[1].outputs[0].token_ids, outputs[0].outputs[0].token_ids)


def test_a_common_prefix_in_one_cold_batch(oracle: Any) -> None:
    """Source: GeeeekExplorer/nano-vllm#208."""
    alone = make(enable_prefix_caching=False, num_kv_blocks=128)
    prompts = [[*(alone.encode(TEXTS[7]) * 2)[:80], 1000 + i] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    right = [alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    llm = make(max_num_batched_tokens=32, num_kv_blocks=128)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.metrics()["prefix_cache_hits"] > 0
    for prompt, output, answer in zip(prompts, outputs, right, strict=True):
        oracle.tie_rule(prompt, output.outputs[0].token_ids, answer)


def test_preempted_requests_that_find_their_own_blocks(oracle: Any) -> None:
    """Source: GeeeekExplorer/nano-vllm#211 and #233."""
    prefix = list(range(300, 348))
    prompts = [prefix + [2000 + 10 * i + j for j in range(10)] for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    roomy = make(enable_prefix_caching=False, max_num_seqs=24)
    right = [output.outputs[0].token_ids for output in roomy.generate(prompts, params, use_tqdm=False)]
    tight = make(max_model_len=None, num_kv_blocks=40, max_num_seqs=24, max_num_batched_tokens=256)
    outputs = tight.generate(prompts, params, use_tqdm=False)
    metrics = tight.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_cache_hits"] > 0
    ties = 0
    for prompt, output, answer in zip(prompts, outputs, right, strict=True):
        ties += oracle.tie_rule(prompt, output.outputs[0].token_ids, answer) is not None
    assert ties <= 3
