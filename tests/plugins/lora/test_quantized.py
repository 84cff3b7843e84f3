"""Adapters on quantized bases: each answer of a mixed batch is its solo answer, and gates stay one product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import ChannelWeight, SummedProduct
from headrace.testing.quantized import grouped_weights

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NAMES = ("a", "b", "c", None)


@pytest.fixture
def modules(tmp_path: Path, adapter: Callable[..., Path]) -> dict[str, Path]:
    return {name: adapter(tmp_path / name, rank, seed=rank) for name, rank in (("a", 1), ("b", 8), ("c", 33))}


def check(model: str, modules: dict[str, Path], vocab: int, **options: Any) -> None:
    prompts = [[(7 * i + 3 * k) % vocab for i in range(5 + 6 * k)] for k in range(len(NAMES))]
    with LLM(model, lora_modules=modules, show_report=False, **options) as llm:
        facts = llm.report.executor
        mixed = [
            list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, lora=NAMES, use_tqdm=False)
        ]
        for name, prompt, together in zip(NAMES, prompts, mixed, strict=True):
            llm.reset_prefix_cache()
            alone = llm.generate(prompt, GREEDY, lora=name, use_tqdm=False)[0].outputs[0].token_ids
            assert list(alone) == together
    assert len({tuple(answer) for answer in mixed}) == len(NAMES)
    with LLM(model, show_report=False, **options) as plain:
        assert plain.report.executor["graph"] == facts["graph"]
        answer = plain.generate(prompts[-1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert list(answer) == mixed[-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_adapters_on_weights_quantized_while_loading(
    base: Any, modules: dict[str, Path], quantization: str, dtype: str
) -> None:
    check(str(base.folder), modules, 131, quantization=quantization, dtype=dtype)


def test_adapters_on_a_packed_gguf_file(
    tmp_path: Path, tiny_gguf: Callable[..., Path], modules: dict[str, Path]
) -> None:
    import gguf
    import numpy as np

    random = np.random.default_rng(1)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    tensors = {
        f"blk.{layer}.{name}.weight": (
            random.normal(size=shape).astype(np.float32),
            gguf.GGMLQuantizationType.Q4_1 if "ffn" in name else gguf.GGMLQuantizationType.Q8_0,
        )
        for layer in range(2)
        for name, shape in shapes.items()
    }
    file = tiny_gguf(tmp_path / "base.gguf", None, tensors)
    check(str(file), modules, 64, quantization="gguf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finished_sums_of_quantized_gates_are_the_gated_product(dtype: torch.dtype) -> None:
    ops = CpuOps()
    if ops.why_not("cpu", "float32"):
        pytest.skip("no native kernels here")
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 127, (80, 256), generator=random).to(torch.int8)
    weights: list[tuple[str, str, Any]] = [("w8a8", "w8a8", ChannelWeight(codes, torch.ones(80)))]
    weights += [("grouped", what, weight) for what, weight in grouped_weights(80, 256)]
    x = torch.randn(33, 256, generator=random).to(dtype)
    for format, what, weight in weights:
        kind = ops.linear(format)
        assert kind is not None
        product = kind.gated([weight], None, "silu_mul")
        assert isinstance(product, SummedProduct), what
        assert torch.equal(product.finish(product.sums(x), dtype), product(x)), what
