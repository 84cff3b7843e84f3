"""Llama against transformers: same random weights, same logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from headrace.backends.torch_reference.ops import TorchOps
from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Model, ModelBuild, ModelDefinition, Parallel
from headrace.models.llama import LlamaDefinition

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def oracle(**changes: Any) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Return transformers' model, its config.json and its tensors; norms and biases are random too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)  # large enough for attention to look somewhere
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return model, config.to_dict(), tensors


VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "other head size": {"head_dim": 24},
    "one kv head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers(variant: str, dense: Any) -> None:
    reference, config, tensors = oracle(**VARIANTS[variant])
    build = dense.build(config, tensors)
    model = LlamaDefinition().build(build)
    assert isinstance(model, Model)
    assert not build.weights.left, "every tensor is used"
    assert len(build.layers) == 2
    ids = torch.randint(0, 131, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.5, "the logits say something"
    for chunks in ([90], [40, 44, 6], [89, 1], [70] + [1] * 20):
        got = dense.run(model, ids, chunks)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_the_reference_op_set_serves_it(dense: Any) -> None:
    reference, config, tensors = oracle()
    model = LlamaDefinition().build(dense.build(config, tensors, ops=TorchOps()))
    ids = list(range(0, 131, 3))
    expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(dense.run(model, ids, [20, 23, 1]), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_taps_are_the_hidden_states_between_layers(dense: Any) -> None:
    reference, config, tensors = oracle()
    model = LlamaDefinition().build(dense.build(config, tensors))
    model.taps = frozenset({0})
    ids = list(range(30))
    _, taps = model.forward(model.embed(torch.tensor(ids)), torch.arange(30), dense.context())
    expected = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
    assert set(taps) == {0}
    torch.testing.assert_close(taps[0], expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_tensors_that_follow_from_others_are_set_aside(dense: Any) -> None:
    _, config, tensors = oracle(tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for index in range(2):
        tensors[f"model.layers.{index}.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    build = dense.build(config, tensors)
    LlamaDefinition().build(build)
    assert not build.weights.left


@torch.inference_mode()
def test_tying_is_told_by_the_tensors_where_the_configuration_is_silent(dense: Any) -> None:
    for tied in (True, False):
        reference, config, tensors = oracle(tie_word_embeddings=tied)
        del config["tie_word_embeddings"]
        model = LlamaDefinition().build(dense.build(config, tensors))
        expected = reference(torch.tensor([[5, 6, 7]])).logits[0]
        torch.testing.assert_close(dense.run(model, [5, 6, 7], [3]), expected, atol=1e-4, rtol=0)


def test_definition_is_the_contract(dense: Any) -> None:
    definition: ModelDefinition = LlamaDefinition()
    assert definition.architectures == ("LlamaForCausalLM",)
    definition.check(SIZES)
    assert definition.max_model_len(SIZES) == 256
    build: ModelBuild = dense.build(SIZES, {})
    assert isinstance(build, ModelBuild)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": "4"}, ["num_attention_heads", "'4'"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1", "0"]),
        ({"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ({"hidden_size": 66}, ["hidden_size (66)", "num_attention_heads (4)"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"max_position_embeddings": -1}, ["max_position_embeddings", "-1"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"head_dim": 15}, ["head_dim", "even", "15"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "nan"]),
        ({"attention_bias": "yes"}, ["attention_bias", "'yes'", "true or false"]),
        ({"mlp_bias": 1}, ["mlp_bias", "1"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"rope_theta": -5}, ["rope_theta", "-5"]),
        (
            {"rope_scaling": {"type": "mrope", "factor": 2}},
            ["rope_type", "mrope", "default, linear, dynamic"],
        ),
        ({"rope_scaling": "llama3"}, ["rope_scaling", "'llama3'"]),
    ],
)
def test_check_names_field_and_value(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        LlamaDefinition().check({**SIZES, **changes})
    for word in words:
        assert word in str(caught.value)


def test_a_missing_field_is_named() -> None:
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        with pytest.raises(CheckpointError, match=field):
            LlamaDefinition().check({key: value for key, value in SIZES.items() if key != field})


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (Parallel(tensor_size=2), "tensor_parallel_size is 2"),
        (Parallel(first_layer=1), r"layers \[1, 2\) of 2"),
        (Parallel(end_layer=1), r"layers \[0, 1\) of 2"),
    ],
)
def test_a_part_of_the_model_is_refused(parallel: Parallel, words: str, dense: Any) -> None:
    with pytest.raises(CheckpointError, match=words):
        LlamaDefinition().build(dense.build(SIZES, {}, parallel=parallel))
