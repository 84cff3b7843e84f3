"""Quantized checkpoints, written by hand as each format defines them: the same numbers and the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.backends.torch_reference.grouped import decoded
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError
from headrace.core.interfaces import ChannelWeight, GroupedWeight
from headrace.core.interfaces.quantization import QuantizationMethod
from headrace.models.safetensors.loader import SafetensorsLoader
from headrace.models.weights import CheckpointWeights
from headrace.plugins.quantization.awq import AWQMethod
from headrace.plugins.quantization.compressed_tensors import CompressedTensorsMethod
from headrace.plugins.quantization.fp8 import FP8Method
from headrace.plugins.quantization.gptq import GPTQMethod

Tensors = dict[str, torch.Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * k) % 128 for i in range(length)] for k, length in enumerate((1, 9, 33))]
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32


def words(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of numbers side by side in int32; number i of a word lies in place `places[i]`."""
    many = 32 // bits
    rows = []
    for row in numbers.tolist():
        packed = []
        for start in range(0, len(row), many):
            word = 0
            for i, number in enumerate(row[start : start + many]):
                word |= number << bits * (i if places is None else places[i])
            packed.append(word - 2**32 if word >= 2**31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def drawn(
    weight: torch.Tensor, bits: int, *, asymmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales [out, groups] float16 and zeros [out, groups] that stand"""
    out, inputs = weight.shape
    groups = inputs // GROUP
    generator = torch.Generator().manual_seed(out * inputs)
    codes = torch.randint(2**bits, (out, inputs), generator=generator)
    scales = (torch.rand(out, groups, generator=generator) + 0.5) * (0.2 / 2**bits)
    middle = 2 ** (bits - 1)
    zeros = torch.full((out, groups), middle)
    if asymmetric:
        zeros = torch.randint(1, 2**bits, (out, groups), generator=generator)
    return codes, scales.half(), zeros


def numbers_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """(code - zero) · scale, exact in float32; groups [in]: the group of each input."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(
    name: str,
    weight: torch.Tensor,
    *,
    bits: int = 4,
    asymmetric: bool = False,
    shuffled: bool = False,
    less: int = 1,
) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = drawn(weight, bits, asymmetric=asymmetric)
    groups = torch.arange(weight.shape[1]) // GROUP
    if shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(name)))]
    tensors = {
        "qweight": words(
            codes.T.reshape(-1, 32 // bits, len(codes)).transpose(1, 2).flatten(0, 1), bits
        ).view(-1, len(codes)),
        "qzeros": words((zeros - less).T, bits),
        "scales": scales.T,
        "g_idx": groups.int(),
    }
    return tensors, numbers_of(codes, scales, zeros, groups)


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = drawn(weight, 4, asymmetric=True)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {"qweight": words(codes.T, 4, places), "qzeros": words(zeros.T, 4, places), "scales": scales.T}
    return tensors, numbers_of(codes, scales, zeros, torch.arange(weight.shape[1]) // GROUP)


def packed(
    name: str, weight: torch.Tensor, *, asymmetric: bool = False, shuffled: bool = False
) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = drawn(weight, 4, asymmetric=asymmetric)
    scales = scales.bfloat16()
    groups = torch.arange(weight.shape[1]) // GROUP
    tensors = {
        "weight_packed": words(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        tensors["weight_zero_point"] = words(zeros.T, 4).T
    if shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        tensors["weight_g_idx"] = groups.int()
    return tensors, numbers_of(codes, scales, zeros, groups)


def whole(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def floats(
    name: str, weight: torch.Tensor, *, scales: str = "channel", key: str = "weight_scale"
) -> tuple[Tensors, torch.Tensor]:
    out, inputs = weight.shape
    scale = {
        "tensor": torch.tensor(0.002),
        "channel": torch.rand(out, 1) / 100,
        "block": torch.rand(-(-out // 16), -(-inputs // 16)) / 100,
    }[scales]
    codes = (torch.randn(out, inputs) * 30).to(torch.float8_e4m3fn)
    spread = (
        scale.repeat_interleave(16, 0)[:out].repeat_interleave(16, 1)[:, :inputs]
        if scales == "block"
        else scale
    )
    return {"weight": codes, key: scale}, codes.float() * spread


def schemes(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
F8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
PACKED = {"format": "pack-quantized"}
Quantize = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
CASES: dict[str, tuple[QuantizationMethod, dict[str, Any], Quantize]] = {
    "gptq": (GPTQMethod(), GPTQ, gptq),
    "gptq-asymmetric": (GPTQMethod(), {**GPTQ, "sym": False}, partial(gptq, asymmetric=True)),
    "gptq-act-order": (GPTQMethod(), {**GPTQ, "desc_act": True}, partial(gptq, shuffled=True)),
    "gptq-8": (GPTQMethod(), {**GPTQ, "bits": 8, "sym": False}, partial(gptq, bits=8, asymmetric=True)),
    "gptq_v2": (
        GPTQMethod(),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        partial(gptq, asymmetric=True, less=0),
    ),
    "awq": (AWQMethod(), {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}, awq),
    "w4a16": (CompressedTensorsMethod(), schemes(W4, **PACKED), packed),
    "w4a16-asymmetric": (
        CompressedTensorsMethod(),
        schemes({**W4, "symmetric": False}, **PACKED),
        partial(packed, asymmetric=True),
    ),
    "w4a16-act-order": (
        CompressedTensorsMethod(),
        schemes({**W4, "actorder": "group"}, **PACKED),
        partial(packed, shuffled=True),
    ),
    "w8a16": (CompressedTensorsMethod(), schemes(W8, format="int-quantized"), whole),
    "ct-fp8": (CompressedTensorsMethod(), schemes(F8, format="float-quantized"), floats),
    "fp8": (FP8Method(), {"quant_method": "fp8"}, partial(floats, scales="tensor")),
    "fp8-blocks": (
        FP8Method(),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        partial(floats, scales="block", key="weight_scale_inv"),
    ),
}


def rewrite(
    source: Path, target: Path, config: Mapping[str, Any], quantize: Quantize, leave: str = "-"
) -> Tensors:
    """Write `source` with its products quantized into `target`; return the same model's tensors in plain numbers."""
    target.mkdir()
    tensors, stored = load_file(source / "model.safetensors"), {}
    for name in sorted(tensors):
        product = name.removesuffix(".weight")
        if product.rpartition(".")[2] not in PRODUCTS or leave in name:
            stored[name] = tensors[name]
            continue
        own, tensors[name] = quantize(product, tensors[name].float())
        stored |= {f"{product}.{end}": tensor.contiguous() for end, tensor in own.items()}
    save_file(stored, target / "model.safetensors")
    plain = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    return tensors


def plain_twin(source: Path, target: Path, tensors: Tensors) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def answers(folder: Path, **options: Any) -> list[Any]:
    with LLM(str(folder), dtype="float32", show_report=False, **options) as llm:
        assert llm.report.executor["row_invariant"]
        assert llm.report.executor["graph"] == "yes"
        together = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
        assert together == [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    return together


@pytest.mark.parametrize("case", list(CASES))
def test_numbers_and_answers(case: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    method, config, quantize = CASES[case]
    tensors = rewrite(tiny_llama_folder, tmp_path / "quantized", config, quantize)
    checkpoint = SafetensorsLoader().open(tmp_path / "quantized")
    assert method.claims(checkpoint.config)
    assert method.why_not(checkpoint) == []
    quantizer, weights = method.begin(checkpoint), CheckpointWeights(checkpoint, torch.float32)
    for name, right in tensors.items():
        if name.removesuffix(".weight").rpartition(".")[2] in PRODUCTS:
            out, inputs = right.shape
            got = quantizer.weight(name.removesuffix(".weight"), (out, inputs), weights)
            assert got is not None
            assert not isinstance(got, ChannelWeight)
            assert torch.equal(decoded(got) if isinstance(got, GroupedWeight) else got, right), name
    checkpoint.close()
    twin = plain_twin(tiny_llama_folder, tmp_path / "plain", tensors)
    assert answers(tmp_path / "quantized") == answers(twin)


def test_whole_numbers_on_both_sides(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """W8A8: what it computes is the online method's business; here that both hold the same weights."""
    config = schemes(W8, BY_TOKEN, format="int-quantized")
    rewrite(tiny_llama_folder, tmp_path / "quantized", config, whole)
    with LLM(str(tmp_path / "quantized"), dtype="float32", show_report=False) as llm:
        assert llm.report.executor["linear_formats"] == {"w8a8": "cpu", "dense": "cpu"}
    options = {"quantization": {"ignore": ["lm_head"]}}
    online = answers(tiny_llama_folder, quantization="w8a8", plugin_options=options)
    assert answers(tmp_path / "quantized") == online


def test_layers_left_as_they_are(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Some of a stack in plain numbers, beside others in 4 bits."""
    config = schemes(W4, **PACKED) | {"ignore": ["lm_head", "re:.*k_proj"]}
    tensors = rewrite(tiny_llama_folder, tmp_path / "quantized", config, packed, leave="k_proj")
    twin = plain_twin(tiny_llama_folder, tmp_path / "plain", tensors)
    found = []
    for folder in (tmp_path / "quantized", twin):
        with LLM(str(folder), dtype="float32", show_report=False) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["no_such", "bitsandbytes", None])
def test_unknown_methods_are_refused_before_weights_are_read(
    method: str | None, tiny_llama_folder: Path
) -> None:
    """QNT-08. Sources: vllm-project/vllm#12268; vllm-project/llm-compressor#134."""
    (tiny_llama_folder / "model.safetensors").write_bytes(b"not to be read")
    config = json.loads((tiny_llama_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tiny_llama_folder / "config.json").write_text(json.dumps(config))
    known = "compressed-tensors, gptq, awq, fp8"
    words = f"config.json: the weights are quantized by '{method}'; methods supported here: {known}"
    with pytest.raises(CheckpointError, match=words) as caught:
        LLM(str(tiny_llama_folder), show_report=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({**GPTQ, "bits": 3}, "'gptq' in a way not known here: bits is 3; known: 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; known: gemm"),
        (
            schemes({**W4, "num_bits": 3}, **PACKED),
            "weights are int of 3 bits; known: int of 4 or 8, float of 8",
        ),
        (schemes(W4, format="marlin-24"), "format is 'marlin-24'; known: pack-quantized"),
        (
            schemes(W8, {**BY_TOKEN, "dynamic": False}, format="int-quantized"),
            "known: int of 8 bits by token",
        ),
    ],
)
def test_schemes_that_are_not_known(config: dict[str, Any], what: str, tiny_llama_folder: Path) -> None:
    stated = json.loads((tiny_llama_folder / "config.json").read_text())
    (tiny_llama_folder / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=what):
        LLM(str(tiny_llama_folder), show_report=False)


def test_a_flag_that_disagrees_names_both(tiny_llama_folder: Path, tmp_path: Path) -> None:
    rewrite(tiny_llama_folder, tmp_path / "quantized", schemes(W4, **PACKED), packed)
    with pytest.raises(
        ConfigError, match=r"quantization is 'int8', but .* is quantized by 'compressed-tensors'"
    ):
        LLM(str(tmp_path / "quantized"), quantization="int8", show_report=False)
    agreed = answers(tmp_path / "quantized", quantization="compressed-tensors")
    assert agreed == answers(tmp_path / "quantized")


@pytest.mark.parametrize("end", ["weight_scale", "weight_packed", "weight_shape"])
def test_tensors_of_other_shapes_are_named(end: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    rewrite(tiny_llama_folder, tmp_path / "quantized", schemes(W4, **PACKED), packed)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.up_proj.{end}"
    tensors[name] = tensors[name].flatten()[:-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(HeadraceError, match="up_proj"):
        LLM(str(tmp_path / "quantized"), show_report=False)
