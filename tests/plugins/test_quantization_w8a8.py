"""`w8a8`: the native products are the definition's, bit by bit, and an engine answers with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.torch_reference.ops import TorchOps
from headrace.core.interfaces import ChannelWeight

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_products_have_the_references_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = ChannelWeight(torch.randint(-127, 128, (70, 100), dtype=torch.int8), torch.rand(70) / 1000)
    x = torch.randn(30, 100).to(dtype)
    results = []
    for ops in (CpuOps(), TorchOps()):
        format = ops.linear("w8a8")
        assert format is not None
        results.append(format.logits(x, format.prepare([weight], None)))
    assert torch.equal(*results)


def test_a_row_that_is_not_finite_gives_nan_and_leaves_others_alone() -> None:
    format = CpuOps().linear("w8a8")
    assert format is not None
    prepared = format.prepare([ChannelWeight(torch.ones(8, 64, dtype=torch.int8), torch.ones(8))], None)
    x = torch.ones(4, 64)
    x[1, 7], x[2, 63] = float("nan"), float("inf")
    got = format.apply(x, prepared)
    assert torch.isfinite(got[[0, 3]]).all()
    assert torch.isnan(got[[1, 2]]).all()


@pytest.mark.weights
def test_an_engine_with_8_bits_on_both_sides(smollm2_path: Path) -> None:
    prompts = [[7 + i] * (3 + 5 * i) for i in range(12)]
    with LLM(str(smollm2_path), quantization="w8a8", max_model_len=256, show_report=False) as llm:
        facts = llm.report.executor
        assert facts["linear_formats"] == {"w8a8": "cpu"}
        assert facts["row_invariant"]
        assert facts["graph"] == "yes"
        assert facts["weights_bytes"] < 0.51 * 2 * facts["parameters"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat([question], GREEDY)
        assert "Paris" in answer.outputs[0].text
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
        assert together == [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
