"""Adapters and the base model in one batch: each answer is its solo answer, and that of the merged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

RANKS = (1, 2, 5, 8, 16, 33, 48, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * k) % 131 for i in range(5 + 6 * k)] for k in range(len(RANKS) + 1)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, adapter: Callable[..., Path]) -> dict[str, str]:
    """Eight adapters; every other one aims at the embedding and the output projection, too."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        f"rank{rank}": str(adapter(folder / f"rank{rank}", rank, seed=rank, embeddings=place % 2 == 0))
        for place, rank in enumerate(RANKS)
    }


def ids(llm: LLM, names: Sequence[str | None], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[: len(names)], params, lora=names, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: Any, base: Any, adapters: dict[str, str]) -> Iterator[tuple[LLM, str]]:
    with LLM(
        str(base.folder), dtype=request.param, lora_modules=adapters, max_loras=4, show_report=False
    ) as llm:
        yield llm, request.param


def test_each_request_of_a_mixed_batch_is_its_solo_run(
    engine: tuple[LLM, str], base: Any, adapters: dict[str, str], merge: Callable[[Any, Path], Any]
) -> None:
    llm, dtype = engine
    names = [*adapters, None]
    together = ids(llm, names)
    assert len({tuple(answer) for answer in together}) == len(names)
    ties = 0
    for name, prompt, answer in zip(names, PROMPTS, together, strict=True):
        llm.reset_prefix_cache()
        alone = llm.generate(prompt, GREEDY, lora=name, use_tqdm=False)[0].outputs[0].token_ids
        assert list(alone) == answer, name
        if dtype == "float32":
            model = base.model if name is None else merge(base.model, Path(adapters[name]))
            ties += base.check(model, prompt, answer)
    assert ties <= 1


def test_requests_without_an_adapter_are_the_plain_engine_s(
    engine: tuple[LLM, str], base: Any, adapters: dict[str, str]
) -> None:
    llm, dtype = engine
    beside = ids(llm, [*adapters, None])[-1]
    with LLM(str(base.folder), dtype=dtype, show_report=False) as plain:
        assert plain.report.executor["graph"] == llm.report.executor["graph"]
        answer = plain.generate(PROMPTS[-1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert list(answer) == beside


def test_the_report_says_that_rows_are_alone_and_passes_recorded(engine: tuple[LLM, str]) -> None:
    facts = engine[0].report.executor
    assert facts["row_invariant"] is True
    assert facts["graph"] == "yes"
