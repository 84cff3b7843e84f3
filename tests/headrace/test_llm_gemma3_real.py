"""Gemma 3 270M gives the reference's tokens, over prompts of three windows, cold and from the prefix cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import HeadraceError

pytestmark = pytest.mark.weights

WINDOW = 512
LIST = "The following is a list of European countries and their capitals. "
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1 2 3 5 8 13",
    "Wenn ich einmal groß bin, werde ich",
    LIST * 130 + "Germany:",
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. " * 90,
)
"""The last two are longer than three windows."""
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def make(gemma3_path: Path) -> Any:
    def build(**options: Any) -> LLM:
        given = {"max_model_len": 2048, "kv_cache_memory": "256MiB", **options}
        return LLM(str(gemma3_path), dtype="float32", show_report=False, **given)

    return build


@pytest.fixture(scope="module")
def llm(make: Any) -> Iterator[LLM]:
    yield make(max_num_batched_tokens=256)
    gc.collect()


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    found = [llm.encode(text) for text in TEXTS]
    found = [ids[: 3 * WINDOW + 3 + at] for at, ids in enumerate(found)]
    assert [len(ids) > 3 * WINDOW for ids in found] == [False] * 6 + [True] * 2
    assert all(ids[0] == 2 for ids in found)
    return found


@pytest.fixture(scope="module")
def expected(gemma3_oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The reference's answers, computed here, never stored."""
    return [gemma3_oracle.greedy(prompt, 32) for prompt in prompts]


def check(oracle: Any, prompts: Any, answers: Sequence[Sequence[int]], expected: Any) -> None:
    ties = [
        oracle.tie_rule(prompt, got, right)
        for prompt, got, right in zip(prompts, answers, expected, strict=True)
    ]
    assert sum(tie is not None for tie in ties) <= 1


def test_cold_and_warm_prompts_of_three_windows(
    llm: LLM, gemma3_oracle: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    windows = llm.report.windows
    assert windows == [None] + [WINDOW] * 5
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    check(gemma3_oracle, prompts, [o.outputs[0].token_ids for o in outputs], expected)
    metrics = llm.metrics()
    assert metrics["num_steps"] > 32 + 2 * 3 * WINDOW // 256  # prompts came in chunks
    assert metrics["prefix_cache_hits"] == 0
    warm = llm.generate(prompts, GREEDY, use_tqdm=False)
    check(gemma3_oracle, prompts, [o.outputs[0].token_ids for o in warm], expected)
    assert llm.metrics()["prefix_cache_hits"] > 0
    assert [o.num_cached_tokens for o in warm] == [(len(ids) - 1) // 16 * 16 for ids in prompts]


def test_whole_prompts_without_a_cache(
    make: Any, gemma3_oracle: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = make(max_num_batched_tokens=4096, enable_prefix_caching=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    check(gemma3_oracle, prompts, [o.outputs[0].token_ids for o in outputs], expected)
    assert llm.metrics()["num_steps"] <= 33
    assert llm.metrics()["prefix_cache_hits"] == 0


def test_blocks_behind_the_window_are_back_in_the_pool(make: Any, prompts: list[list[int]]) -> None:
    llm = make(max_num_batched_tokens=256)
    stream = llm.stream(prompts[7], GREEDY)
    next(stream)
    metrics = llm.metrics()
    stream.close()
    held = metrics["kv_blocks_total"] - metrics["kv_blocks_free"]
    whole = -(-len(prompts[7]) // 16)
    of_a_window = (WINDOW + 2 * 256) // 16 + 2  # what a step adds, twice where one is planned ahead
    assert whole < held <= whole + 5 * of_a_window < 6 * whole


def test_it_is_ready_quickly(make: Any, llm: LLM) -> None:
    """The interpreter's imports are done; weights, KV memory, vocabulary. Processor time: tests share the machine."""
    seconds = []
    for _ in range(2):
        start = time.process_time()
        make()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 4
    assert llm.report is not None


def test_chat_says_that_there_is_no_template(llm: LLM) -> None:
    with pytest.raises(HeadraceError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
