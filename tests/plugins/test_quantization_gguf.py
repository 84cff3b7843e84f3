"""GGUF run packed: the numbers of every encoding, the memory it takes, and an engine's answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.torch_reference.grouped import decoded
from headrace.core.errors import ConfigError
from headrace.models.gguf.dequantize import ENCODINGS, Encoding, decode_blocks
from headrace.plugins.quantization.gguf_blocks import UNPACKERS

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def encoded(encoding: Encoding, rows: int, blocks: int) -> torch.Tensor:
    """Random blocks; their scales, which are float16, are finite and of both signs."""
    generator = np.random.default_rng(encoding.code)
    data = generator.integers(0, 256, (rows * blocks, encoding.bytes), np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    for start in halves.get(encoding.name, (0,)):
        scales = generator.normal(0, 0.01, len(data)).astype(np.float16)
        data[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(data.reshape(rows, -1))


@pytest.mark.parametrize("name", list(UNPACKERS))
def test_numbers_are_those_of_the_format(name: str) -> None:
    """Bit by bit, from the reference format and out of the packed panels."""
    encoding = next(one for one in ENCODINGS.values() if one.name == name)
    rows, inputs = 40, 512
    data = encoded(encoding, rows, inputs // encoding.elements)
    right = decode_blocks(encoding, data.numpy(), torch.float32).view(rows, inputs)
    weight = UNPACKERS[name](data)
    assert weight.shape == (rows, inputs)
    assert torch.equal(decoded(weight), right)
    native = CpuOps().linear("grouped")
    assert native is not None
    prepared = native.prepare([weight], None)
    assert torch.equal(native.rows(torch.arange(rows), prepared, torch.float32), right)
    assert torch.equal(native.rows(torch.arange(rows), prepared, torch.bfloat16), right.bfloat16())
    assert weight.nbytes <= 1.1 * data.nbytes


@pytest.mark.weights
def test_the_alias_runs_the_file_packed(smollm2_path: Path) -> None:
    with LLM("smollm2-q4", max_model_len=256, show_report=False) as llm:
        facts = llm.report.executor
        assert facts["quantization"] == "gguf"
        assert facts["linear_formats"] == {"grouped": "cpu"}
        assert facts["row_invariant"]
        assert facts["graph"] == "yes"
        assert abs(facts["weights_bytes"] / smollm2_path.stat().st_size - 1) < 0.1
        assert "MiB as gguf (grouped by cpu), computed in bfloat16" in str(llm.report)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat([question], GREEDY)
        assert "Paris" in answer.outputs[0].text


@pytest.mark.weights
def test_answers_do_not_depend_on_neighbours(smollm2_path: Path) -> None:
    prompts = [[7 + i] * (3 + 5 * i) for i in range(12)]
    with LLM(str(smollm2_path), quantization="gguf", max_model_len=256, show_report=False) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
        assert together == alone
    with LLM(
        str(smollm2_path), quantization="gguf", max_model_len=256, show_report=False, enforce_eager=True
    ) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == alone


def test_what_is_no_gguf_is_refused(tiny_llama_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"quantization 'gguf' cannot be used on .*: it has no tensors of a GGUF"
    ):
        LLM(str(tiny_llama_folder), quantization="gguf", show_report=False)


@pytest.mark.weights
def test_mixed_encodings_in_a_stack(gemma3_path: Path) -> None:
    """Gemma's file holds q and k in other encodings than v in some layers. In float32 packed and decoded agree."""
    prompts = ["The capital of France is", "Once upon a time"]
    answers = []
    for method in ("gguf", None):
        with LLM(
            str(gemma3_path), quantization=method, dtype="float32", max_model_len=256, show_report=False
        ) as llm:
            answers.append([one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)])
            facts = llm.report.executor
            if method is not None:
                assert facts["linear_formats"] == {"grouped": "cpu"}
                assert facts["graph"] == "yes"
                assert abs(facts["weights_bytes"] / gemma3_path.stat().st_size - 1) < 0.1
    assert answers[0] == answers[1]


def test_a_config_of_another_method_stops_a_gguf_flag(tiny_llama_folder: Path, tmp_path: Path) -> None:
    for file in tiny_llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "no_such"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Exception, match=r"config.json: the weights are quantized by 'no_such'; methods supported"
    ):
        LLM(str(tmp_path), quantization="gguf", show_report=False)
