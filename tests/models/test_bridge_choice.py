"""When the bridge builds a model: asked for, or because no definition here serves the architecture."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import CheckpointError, ConfigError
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
