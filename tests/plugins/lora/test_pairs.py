"""Adapters beside other features: each pair gives the ids of adapters alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

NAMES = ("a", "b", None, "c", "a", "b")
PROMPTS = [[(5 * i + 11 * k) % 131 for i in range(20 + 17 * k)] for k in range(len(NAMES))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory, adapter: Callable[..., Path]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        name: adapter(folder / name, rank, seed=rank, embeddings=name == "b")
        for name, rank in (("a", 4), ("b", 16), ("c", 33))
    }


def answers(base: Any, modules: dict[str, Path], rounds: int = 1, **options: Any) -> list[Any]:
    """Return ids and log-probabilities; of several rounds the last."""
    with LLM(str(base.folder), dtype="bfloat16", lora_modules=modules, show_report=False, **options) as llm:
        for _ in range(rounds):
            found = []
            for params in PARAMS:
                wanted = params.model_copy(update={"logprobs": 2})
                outputs = llm.generate(PROMPTS, wanted, lora=NAMES, use_tqdm=False)
                found += [
                    [
                        (token, [(k, v.logprob) for k, v in tops.items()])
                        for token, tops in zip(
                            o.outputs[0].token_ids, o.outputs[0].logprobs or [], strict=True
                        )
                    ]
                    for o in outputs
                ]
        if "num_kv_blocks" in options:
            assert llm.metrics()["num_preemptions"] > 0
    return found


@pytest.fixture(scope="module")
def alone(base: Any, modules: dict[str, Path]) -> list[Any]:
    return answers(base, modules, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 2},
        {"max_num_batched_tokens": 7},
        {"max_loras": 1, "max_num_batched_tokens": 16},
        {"num_kv_blocks": 14, "max_model_len": 160},
        {"speculative_method": "ngram", "num_speculative_tokens": 4},
        {
            "speculative_method": "ngram",
            "num_kv_blocks": 14,
            "max_model_len": 160,
            "max_num_batched_tokens": 16,
        },
        {"enforce_eager": True},
    ],
    ids=["prefix cache", "chunks", "one slot", "preemption", "drafts", "drafts and preemption", "eager"],
)
def test_a_pair_gives_what_adapters_alone_give(
    base: Any, modules: dict[str, Path], alone: list[Any], options: dict[str, Any]
) -> None:
    assert answers(base, modules, **options) == alone


def test_the_torch_ops_answer_alike(
    base: Any, modules: dict[str, Path], merge: Callable[[Any, Path], Any]
) -> None:
    with LLM(
        str(base.folder),
        dtype="float32",
        lora_modules=modules,
        disable_plugins=["cpu"],
        attention_backend="torch",
        show_report=False,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS[0], lora=NAMES, use_tqdm=False)
    ties = 0
    for name, prompt, output in zip(NAMES, PROMPTS, outputs, strict=True):
        model = base.model if name is None else merge(base.model, modules[name])
        ties += base.check(model, prompt, output.outputs[0].token_ids)
    assert ties <= 1


def test_prompt_logprobs_are_those_of_the_adapter(base: Any, modules: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(str(base.folder), dtype="float32", lora_modules=modules, show_report=False) as llm:
        mixed = llm.generate(PROMPTS[:4], params, lora=NAMES[:4], use_tqdm=False)
        for name, prompt, output in zip(NAMES, PROMPTS, mixed, strict=False):
            alone = llm.generate(prompt, params, lora=name, use_tqdm=False)[0]
            assert alone.prompt_logprobs == output.prompt_logprobs
    assert mixed[0].prompt_logprobs[1] != mixed[2].prompt_logprobs[1]


def test_adapters_on_a_gguf_base(
    tmp_path: Path, tiny_gguf: Callable[..., Path], adapter: Callable[..., Path]
) -> None:
    file = tiny_gguf(tmp_path / "base.gguf")
    modules = {name: adapter(tmp_path / name, rank, seed=rank) for name, rank in (("a", 4), ("b", 20))}
    prompts = [[(5 * i + k) % 64 for i in range(9 + k)] for k in range(3)]
    names = ("a", "b", None)
    with LLM(str(file), lora_modules=modules, show_report=False) as llm:
        mixed = [
            list(o.outputs[0].token_ids) for o in llm.generate(prompts, PARAMS[0], lora=names, use_tqdm=False)
        ]
        llm.reset_prefix_cache()
        for name, prompt, together in zip(names, prompts, mixed, strict=True):
            alone = llm.generate(prompt, PARAMS[0], lora=name, use_tqdm=False)[0].outputs[0].token_ids
            assert list(alone) == together
        plain = [list(o.outputs[0].token_ids) for o in llm.generate(prompts[:2], PARAMS[0], use_tqdm=False)]
    assert plain[0] != mixed[0]
    assert plain[1] != mixed[1]
