"""Methods that quantize while loading: what becomes of the numbers, and of an engine that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.plugins.quantization.online import by_channel

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_rounding_by_channel() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 50) * torch.tensor([1e-3, 1, 1e3, 1, 0, 1])[:, None]
    codes, scales = by_channel(weight)
    assert codes.dtype == torch.int8
    assert int(codes.abs().amax()) == 127
    assert not codes[4].any()
    assert (codes.float() * scales[:, None] - weight).abs().le(scales[:, None] / 2 * 1.001).all()


@pytest.mark.weights
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_halves_the_weights(dtype: str, smollm2_path: Path) -> None:
    with LLM(
        str(smollm2_path), quantization="int8", dtype=dtype, max_model_len=256, show_report=False
    ) as llm:
        facts = llm.report.executor
        assert facts["quantization"] == "int8"
        assert facts["row_invariant"]
        assert facts["weights_bytes"] < 0.51 * 2 * facts["parameters"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat([question], GREEDY)
        assert "Paris" in answer.outputs[0].text


def test_methods_are_named_where_one_is_unknown(tiny_llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no quantization method is called 'int9'.*there are: gguf, int8"):
        LLM(str(tiny_llama_folder), quantization="int9", show_report=False)


def test_the_fingerprint_tells_methods_apart(tiny_llama_folder: Path) -> None:
    found = set()
    for method in (None, "int8"):
        with LLM(str(tiny_llama_folder), quantization=method, show_report=False) as llm:
            found.add(llm.report.executor["fingerprint"])
    assert len(found) == 2
