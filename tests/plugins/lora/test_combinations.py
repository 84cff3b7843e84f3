"""Adapters on weights of few bits, with a KV cache of 8, beside prefix hits, preemption and drafts: one answer each.

Every kind of weights meets every kind of KV cache; a case's modes are compared with the same engine when it has room
for all, caches nothing and drafts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

WEIGHTS = (None, "int8", "int4", "w8a8")
KV = ("auto", "int8")
MODES: dict[str, dict[str, Any]] = {
    "chunks, prefix cache, drafts": {
        "max_num_batched_tokens": 16,
        "speculative_method": "ngram",
        "num_speculative_tokens": 4,
        "adaptive_drafts": False,
    },
    "preemption, drafts": {
        "num_kv_blocks": 14,
        "max_model_len": 160,
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "adaptive_drafts": False,
    },
    "preemption, eager": {"num_kv_blocks": 14, "max_model_len": 160, "enforce_eager": True},
}
NAMES = ("a", "b", None, "a", "b", None)
LOOP = [3, 4, 5, 6] * 3
PROMPTS = [LOOP + [(5 * i + 11 * k) % 64 for i in range(8 + 17 * k)] for k in range(len(NAMES))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory, adapter: Callable[..., Path]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("combined")
    return {name: adapter(folder / name, rank, seed=rank) for name, rank in (("a", 4), ("b", 16))}


def run(model: Path, modules: dict[str, Path], kv: str, **options: Any) -> list[Any]:
    """Return ids and log-probabilities of the second of two rounds, and check that the modes asked for happened."""
    with LLM(
        str(model), dtype="bfloat16", kv_cache_dtype=kv, lora_modules=modules, show_report=False, **options
    ) as llm:
        for _ in range(2):
            found = [
                [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
                for params in PARAMS
                for outputs in [llm.generate(PROMPTS, params, lora=NAMES, use_tqdm=False)]
            ]
        facts, metrics = llm.report.executor, llm.metrics()
        assert facts["row_invariant"]
        assert facts["quantization"] == options.get("quantization")
        assert facts["graph"].startswith("no") if options.get("enforce_eager") else facts["graph"] == "yes"
        assert ("int8" in str(llm.report).split("KV cache")[1].splitlines()[0]) == (kv == "int8")
        if "num_kv_blocks" in options:
            assert metrics["num_preemptions"] > 0
        if options.get("enable_prefix_caching", True) and "num_kv_blocks" not in options:
            assert metrics["prefix_cache_hits"] > 0
        if "speculative_method" in options:
            assert metrics["spec_decode_num_accepted_tokens"] > 0
    return found


def different(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a != b for a, b in zip(itertools.chain(*one), itertools.chain(*other), strict=True))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_modes_change_nothing(base: Any, modules: dict[str, Path], weights: str | None, kv: str) -> None:
    options = {} if weights is None else {"quantization": weights}
    plain = run(base.folder, modules, kv, enable_prefix_caching=False, **options)
    assert {
        name: different(run(base.folder, modules, kv, **options, **mode), plain)
        for name, mode in MODES.items()
    } == dict.fromkeys(MODES, 0)
