"""Batch invariance, end to end: a request's ids and log-probabilities are the same bits whatever else runs.

In bfloat16, on every tier of the native backend that this machine runs; each test asserts that its mode happened.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.backends.cpu.isa import ISA_VARIABLE, supported_tiers

pytestmark = pytest.mark.alone  # threads are a part of it

TIERS = [tier.name for tier in supported_tiers()]
LENGTHS = (3, 16, 33, 100, 100, 150, 47)
Answers = list[tuple[list[int], Any, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers: grouped heads of size 32, 512 positions."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two of them begin alike."""
    draw = random.Random(0)
    made = [[draw.randrange(3, 384) for _ in range(length)] for length in LENGTHS]
    made[4][:80] = made[3][:80]
    return made


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)


def make(folder: Path, **options: Any) -> LLM:
    llm = LLM(str(folder), dtype="bfloat16", show_report=False, **options)
    assert "batch-invariant: yes" in str(llm.report)
    return llm


def params(index: int) -> SamplingParams:
    """Greedy and drawn ones, with and without the prompt's log-probabilities."""
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9,
        seed=index,
        max_tokens=24,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2 if index % 3 == 0 else None,
    )


def answer(llm: LLM, prompts: list[list[int]], indices: list[int]) -> Answers:
    outputs = llm.generate([prompts[i] for i in indices], [params(i) for i in indices], use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.fixture
def alone(folder: Path, prompts: list[list[int]], tier: str) -> Answers:
    """Each request in an engine that runs nothing else, its prompt in one step, the model as it is."""
    llm = make(folder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True)
    assert llm.report.executor["graph"].startswith("no: enforce_eager")
    answers = [answer(llm, prompts, [index])[0] for index in range(len(prompts))]
    assert llm.metrics()["iteration_requests_max"] == 1
    assert len({tuple(ids) for ids, _, _ in answers}) == len(answers)
    return answers


def test_all_modes(folder: Path, prompts: list[list[int]], tier: str, alone: Answers) -> None:
    everything = list(range(len(prompts)))

    llm = make(folder, max_num_batched_tokens=4096)
    assert llm.report.executor["graph"] == "yes"
    assert answer(llm, prompts, everything) == alone
    assert llm.metrics()["iteration_requests_max"] == len(prompts)
    cold = llm.metrics()["prefix_cache_hits"]
    assert cold > 0  # of the two that begin alike
    assert answer(llm, prompts, everything[::-1]) == alone[::-1]
    assert llm.metrics()["prefix_cache_hits"] > cold + 200

    torch.set_num_threads(1)
    assert answer(llm, prompts, everything) == alone
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert answer(llm, prompts, everything) == alone

    llm = make(folder, max_num_batched_tokens=32, max_num_seqs=4)
    assert answer(llm, prompts, everything) == alone
    assert llm.metrics()["num_steps"] > sum(LENGTHS) / 32


def test_preempted(folder: Path, prompts: list[list[int]], tier: str, alone: Answers) -> None:
    llm = make(folder, num_kv_blocks=24, max_model_len=200)
    assert answer(llm, prompts, list(range(len(prompts)))) == alone
    assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.weights
def test_real_weights() -> None:
    prompts = [
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):\n    ",
        "Water boils at " * 40,
    ]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)

    def run(llm: LLM, texts: list[str]) -> list[tuple[list[int], Any]]:
        outputs = llm.generate(texts, sampling, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    small = LLM(
        "smollm2",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        show_report=False,
    )
    alone = [run(small, [text])[0] for text in prompts]
    large = LLM(
        "smollm2", dtype="bfloat16", max_model_len=512, max_num_batched_tokens=4096, show_report=False
    )
    assert large.report.executor["graph"] == "yes"
    assert run(large, prompts) == alone
    assert run(large, prompts[::-1]) == alone[::-1]
    assert large.metrics()["prefix_cache_hits"] > 0


def test_torch_promises_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "torch")
    llm = LLM(str(folder), dtype="bfloat16", show_report=False)
    assert llm.report.executor["attention_backend"] == "torch"
    assert "batch-invariant: no" in str(llm.report)
    assert llm.report.executor["graph"].startswith("no: ")


def test_another_tier_has_another_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for tier in [*TIERS, "torch"]:
        monkeypatch.setenv(ISA_VARIABLE, tier)
        seen.add(LLM(str(folder), dtype="float32", show_report=False).report.executor["fingerprint"])
    assert len(seen) == len(TIERS) + 1
