"""Methods that quantize while loading: what becomes of the numbers, and of an engine that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.plugins.quantization.rounding import by_channel, by_group

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


def test_codes_of_groups_err_little() -> None:
    """Never more than plain rounding to the whole range, and much less where one number stands out."""
    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    weight[0, 5], weight[1] = 12.0, 0.0
    codes, scales = by_group(weight, 32)
    got = ((codes.float() - 8).view(16, 4, 32) * scales.float()[:, :, None]).view(16, 128)
    plain = (weight.view(16, 4, 32).abs().amax(2) / 7).bfloat16().float()[:, :, None]
    rounded = torch.round(weight.view(16, 4, 32) / plain.clamp(1e-9)).clamp(-8, 7) * plain
    errors = ((got - weight) ** 2).view(16, 4, 32).sum(2)
    assert (errors <= ((rounded.view(16, 128) - weight) ** 2).view(16, 4, 32).sum(2)).all()
    assert not got[1].any()
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 15


@pytest.mark.weights
def test_int4_takes_a_quarter(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), quantization="int4", max_model_len=256, show_report=False) as llm:
        facts = llm.report.executor
        assert facts["linear_formats"] == {"grouped": "cpu"}
        assert (
            facts["weights_bytes"] < 0.36 * 2 * facts["parameters"]
        )  # the head holds 8 bits, and is a fifth
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat([question], SamplingParams(temperature=0, max_tokens=24))
        assert "Paris" in answer.outputs[0].text


def test_groups_that_do_not_divide_are_refused_with_those_that_do(tiny_llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"96 inputs, which groups of 64 do not divide .*those that do: 32"):
        LLM(
            str(tiny_llama_folder),
            quantization="int4",
            plugin_options={"quantization": {"group_size": 64}},
            show_report=False,
        )


def test_layers_that_options_leave_out(tiny_llama_folder: Path) -> None:
    taken, told = [], ""
    for ignored in ([], ["mlp"], ["re:.*proj$", "lm_head"]):
        options = {"quantization": {"ignore": ignored}}
        with LLM(
            str(tiny_llama_folder), quantization="int8", plugin_options=options, show_report=False
        ) as llm:
            facts, told = llm.report.executor, str(llm.report)
        taken.append((facts["weights_bytes"], "grouped" in facts["linear_formats"]))
    assert taken[0] < taken[1] < taken[2]
    assert not taken[2][1]
    assert "nothing was to be quantized" in told
