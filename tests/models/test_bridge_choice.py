"""When the bridge builds a model: asked for, or because no definition here serves the architecture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams, hookimpl
from headrace.backends.torch_reference.attention import TorchAttention
from headrace.backends.torch_reference.ops import DenseLinear, TorchOps
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.interfaces import LinearFormat, Op
from headrace.core.plugin.registry import Registry
from headrace.models.bridge import choose, library
from headrace.models.bridge.choose import definition_for
from headrace.models.bridge.definition import BridgeDefinition
from headrace.models.llama import LlamaDefinition

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GLM = {**LLAMA, "architectures": ["GlmForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}


def test_our_own_definition_comes_first(models_registry: Registry) -> None:
    definition, note = definition_for(LLAMA, models_registry)
    assert isinstance(definition, LlamaDefinition)
    assert note is None


def test_the_bridge_serves_what_nobody_does_and_says_so(models_registry: Registry) -> None:
    definition, note = definition_for(GLM, models_registry)
    assert isinstance(definition, BridgeDefinition)
    assert note is not None
    assert "GlmForCausalLM" in note
    assert "transformers" in note


def test_a_definition_by_name(models_registry: Registry) -> None:
    definition, note = definition_for(LLAMA, models_registry, "transformers")
    assert isinstance(definition, BridgeDefinition)
    assert note is None
    assert isinstance(definition_for(LLAMA, models_registry, "llama")[0], LlamaDefinition)
    with pytest.raises(CheckpointError, match=r"model_impl is 'llama'.*LlamaForCausalLM.*GlmForCausalLM"):
        definition_for(GLM, models_registry, "llama")
    with pytest.raises(ConfigError, match="transfomers"):
        definition_for(LLAMA, models_registry, "transfomers")


def test_what_transformers_lacks_too_is_refused_as_ever(models_registry: Registry) -> None:
    with pytest.raises(CheckpointError, match="the model's architecture is NobodysModel"):
        definition_for({**LLAMA, "architectures": ["NobodysModel"]}, models_registry)


def test_without_the_package(models_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose, library):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(CheckpointError, match="the model's architecture is GlmForCausalLM"):
        definition_for(GLM, models_registry)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'headrace\[bridge\]'"):
        definition_for(LLAMA, models_registry, "transformers")


class _SureAttention(TorchAttention):
    row_invariant = True


class _SureLinear(DenseLinear):
    row_invariant = True


class _SureOps(TorchOps):
    def get(self, name: str) -> Op | None:
        op = super().get(name)
        return op and dataclasses.replace(op, row_invariant=True)

    def linear(self, format: str) -> LinearFormat | None:
        return _SureLinear() if format == "dense" else None


class _Sure:
    """Every part promises that rows do not disturb each other."""

    name = "sure"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.attention_backend("torch", _SureAttention, override=True)
        registrar.op_set("torch", _SureOps, override=True)


@pytest.mark.parametrize("model_impl", ["llama", "transformers"])
def test_what_transformers_computes_is_not_promised(model_impl: str, tiny_llama_folder: Path) -> None:
    """Backend and ops speak for themselves; norms, activations and sums of the bridge are neither's."""
    with LLM(str(tiny_llama_folder), model_impl=model_impl, plugins=[_Sure()], show_report=False) as llm:
        ours = model_impl == "llama"
        assert llm.report.executor["row_invariant"] is ours
        assert f"batch-invariant: {'yes' if ours else 'no'}" in str(llm.report)


@pytest.mark.weights
def test_real_weights_give_the_references_tokens(oracle: Any) -> None:
    llm = LLM(
        "smollm2",
        model_impl="transformers",
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
        show_report=False,
    )
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "one two three four five six seven " * 5]
    prompts = [llm.encode(text) for text in texts]
    assert sum(map(len, prompts)) > 16, "prompts are computed in chunks"
    outputs = llm.generate(
        texts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False
    )
    ties = [
        oracle.tie_rule(prompt, output.outputs[0].token_ids, oracle.greedy(prompt, 24))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert sum(tie is not None for tie in ties) <= 1
