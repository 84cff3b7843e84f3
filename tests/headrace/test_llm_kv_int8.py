"""`kv_cache_dtype=int8` in an engine: half the memory, and the same answers alone and together."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7 + i] * 3 + list(range(40 + i, 60 + 9 * i)) for i in range(8)]


@pytest.mark.weights
@pytest.mark.parametrize("quantization", [None, "gguf"])
def test_an_engine_with_a_cache_of_8_bits(quantization: str | None, smollm2_path: Path) -> None:
    pages = []
    for kind in ("auto", "int8"):
        with LLM(
            str(smollm2_path),
            quantization=quantization,
            kv_cache_dtype=kind,
            max_model_len=256,
            num_kv_blocks=40,
            show_report=False,
        ) as llm:
            pages.append(llm.report.page_bytes)
            if kind == "auto":
                continue
            assert llm.report.executor["kv_dtype"] == "int8"
            assert llm.report.executor["row_invariant"]
            assert llm.report.executor["graph"] == "yes"
            # Few blocks: some are preempted, and prompts are computed in other chunks than alone.
            together = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
            alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
            assert together == alone
            question = [{"role": "user", "content": "What is the capital of France?"}]
            (answer,) = llm.chat([question], GREEDY)
            assert "Paris" in answer.outputs[0].text
    # 64 numbers and a scale of 4 bytes take 68 bytes; they took 128.
    assert pages[1] * 128 == pages[0] * 68


def test_the_reference_holds_8_bits_too(tiny_llama_folder: Path) -> None:
    answers = []
    for backend in ("cpu", "torch"):
        with LLM(
            str(tiny_llama_folder),
            dtype="float32",
            attention_backend=backend,
            kv_cache_dtype="int8",
            show_report=False,
        ) as llm:
            if backend == "torch":
                assert llm.report.executor["kv_dtype"] == "int8"
            ids = [[(7 * i + 3 * k) % 128 for i in range(length)] for k, length in enumerate((1, 9, 33))]
            answers.append([one.outputs[0].token_ids for one in llm.generate(ids, GREEDY)])
    assert answers[0] == answers[1]


def test_types_that_no_backend_has_are_refused_with_reasons(tiny_llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV dtype int3 \(serves: .*int8"):
        LLM(str(tiny_llama_folder), kv_cache_dtype="int3", show_report=False)
