"""Models of transformers on our attention context: the same logits as its own forward gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.core_model_loading import revert_weight_conversion

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import (
    AttentionLayer,
    AttentionSpec,
    Embedding,
    Model,
    ModelBuild,
    ModelDefinition,
    Parallel,
)
from headrace.models.bridge.alone import check_tokens_stand_alone
from headrace.models.bridge.definition import BridgeDefinition

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 8, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 96},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "stablelm": {},  # passes no keyword arguments down
    "starcoder2": {"sliding_window": 8},
    "cohere": {"logit_scale": 3.0, "tie_word_embeddings": True},
    "cohere2": {**WINDOWS, "logit_scale": 3.0},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 9.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "exaone4": WINDOWS,
    "helium": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "nemotron": {},
    "olmo3": WINDOWS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8, "rope_parameters": None},
}
WINDOWED = {"starcoder2", "cohere2", "gemma2", "exaone4", "olmo3", "gpt_oss"}


class Weights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.left = dict(tensors)
        self.taken: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.left or name in self.taken

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.left.pop(name, self.taken.get(name))
        if tensor is None or tensor.shape != shape:
            raise CheckpointError(f"tensor {name} {shape}")
        self.taken[name] = tensor
        return tensor


class Product:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 2
        return F.linear(x, self.weight, self.bias)


class Build:
    """A `ModelBuild` over plain tensors."""

    device = "cpu"
    dtype = torch.float32
    max_model_len = 256

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = Weights(tensors)
        self.parallel = Parallel()
        self.layers: list[AttentionLayer] = []
        self.products: list[str] = []

    def op(self, name: str) -> Any:
        raise AssertionError(f"the bridge has its own {name}")

    def linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], bias: bool = False
    ) -> Product:
        (name,), (out,) = names, out_features
        self.products.append(name)
        weight = self.weights.take(f"{name}.weight", (out, in_features))
        return Product(weight, self.weights.take(f"{name}.bias", (out,)) if bias else None)

    def gated_linear(self, *names: str, **options: Any) -> Product:
        raise AssertionError("the bridge's activations are the library's")

    def lm_head(self, name: str, vocab_size: int, hidden_size: int) -> Product:
        raise AssertionError("the bridge's heads are products like others, or tied")

    def tied_embedding(self, name: str, vocab_size: int, hidden_size: int) -> tuple[Embedding, Product]:
        weight = self.weights.taken[f"{name}.weight"]
        assert weight.shape == (vocab_size, hidden_size)
        return lambda ids: F.embedding(ids, weight), Product(weight)

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        return lookup

    def attention(self, name: str, spec: AttentionSpec, *, scale: float) -> AttentionLayer:
        layer = AttentionLayer(
            name, spec.num_heads, spec.num_kv_heads, spec.head_dim, scale, spec.window, spec.soft_cap
        )
        self.layers.append(layer)
        return layer

    def attention_spec(self, **changes: Any) -> AttentionSpec:
        return AttentionSpec(dtype="float32", kv_dtype="float32", block_size=16, **changes)


class Context:
    """A `ForwardContext` of several sequences: K and V grow; attention is dense, with all that a layer may ask."""

    def __init__(self) -> None:
        self.cache: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.counts: Sequence[int] = ()

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert all(one.is_contiguous() for one in (q, k, v))
        parts = zip(*(one.split(list(self.counts)) for one in (q, k, v)), strict=True)
        return torch.cat([self.one(layer, index, *part) for index, part in enumerate(parts)])

    def one(
        self, layer: AttentionLayer, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if (layer.name, index) in self.cache:
            old_k, old_v = self.cache[layer.name, index]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.cache[layer.name, index] = (k, v)
        group, n, m = layer.num_heads // layer.num_kv_heads, q.shape[0], k.shape[0]
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)[None, :]
        hidden = (behind < 0) | (behind >= (layer.window or m))
        scores = scores.masked_fill(hidden, -math.inf)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, n, 1)), -1)
        weights = scores.softmax(-1)[..., :m]
        return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(group, 1)).reshape(n, -1)


def reference(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Return transformers' model, its config.json and its tensors as it would save them."""
    torch.manual_seed(0)
    sizes = {**SIZES, **CASES.get(model_type, {}), **changes}
    config = transformers.CONFIG_MAPPING[model_type](**{k: v for k, v in sizes.items() if v is not None})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)  # large enough for attention to look somewhere
    saved = revert_weight_conversion(model, model.state_dict())
    tensors = {name: tensor.detach().clone() for name, tensor in saved.items()}
    for name in model.all_tied_weights_keys:
        tensors.pop(name, None)
    return model, {**config.to_dict(), "architectures": [type(model).__name__]}, tensors


def run(model: Model, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits [N, V] of all positions, computed in chunks of these sizes."""
    context, logits, start = Context(), [], 0
    for count in chunks:
        span = torch.arange(start, start + count)
        context.counts = [count]
        hidden, taps = model.forward(model.embed(torch.tensor(ids)[span]), span, context)
        assert taps == {}
        logits.append(model.logits(hidden))
        start += count
    return torch.cat(logits)


def some_ids(n: int) -> list[int]:
    return torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("model_type", CASES)
@torch.inference_mode()
def test_logits_equal_transformers(model_type: str) -> None:
    """Chunked and whole; every tensor is used, and most through the engine's products."""
    original, config, tensors = reference(model_type)
    build = Build(config, tensors)
    model = BridgeDefinition().build(build)
    assert isinstance(model, Model)
    assert not build.weights.left
    assert len(build.layers) == original.config.num_hidden_layers
    assert ({layer.window for layer in build.layers} - {None} == {8}) is (model_type in WINDOWED)
    assert build.products or model_type == "gpt2"  # whose products are Conv1D
    ids = some_ids(60)
    expected = original(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1, "the logits say something"
    for chunks in ([60], [20, 30, 9, 1]):
        got = run(model, ids, chunks)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["gpt_neox", "stablelm", "cohere2", "qwen2_moe", "gpt_oss"])
@torch.inference_mode()
def test_greedy_ids_by_the_tie_rule_with_requests_mixed(model_type: str) -> None:
    """Three requests of different lengths share every step; each gets what it gets alone."""
    original, config, tensors = reference(model_type)
    model = BridgeDefinition().build(Build(config, tensors))
    sequences = [some_ids(n) for n in (5, 23, 11)]
    context, news = Context(), [list(ids) for ids in sequences]
    for _ in range(12):
        context.counts = [len(new) for new in news]
        spans = [range(len(s) - len(new), len(s)) for s, new in zip(sequences, news, strict=True)]
        positions = torch.tensor([p for span in spans for p in span])
        hidden, _ = model.forward(
            model.embed(torch.tensor([one for new in news for one in new])), positions, context
        )
        last = torch.tensor(context.counts).cumsum(0) - 1
        drawn = model.logits(hidden[last]).argmax(-1).tolist()
        news = [[one] for one in drawn]
        for sequence, one in zip(sequences, drawn, strict=True):
            sequence.append(one)
    for sequence in sequences:
        logits = original(torch.tensor([sequence[:-1]])).logits[0, -12:]
        chosen = logits.gather(1, torch.tensor(sequence[-12:])[:, None])[:, 0]
        assert torch.all(logits.max(-1).values - chosen < 1e-3)


@torch.inference_mode()
def test_names_without_the_decoders_prefix_and_old_buffers() -> None:
    """Checkpoints of GPT-2 name the decoder's tensors alone, and carry causal masks."""
    original, config, tensors = reference("gpt2")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(2)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    build = Build(config, tensors)
    model = BridgeDefinition().build(build)
    assert not build.weights.left
    ids = some_ids(20)
    expected = original(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(model, ids, [20]), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_tied_head_that_was_saved_is_set_aside() -> None:
    original, config, tensors = reference("cohere")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    build = Build(config, tensors)
    model = BridgeDefinition().build(build)
    assert not build.weights.left
    expected = original(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(run(model, [5, 6, 7], [3]), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_tied_weights_saved_under_the_heads_name_only() -> None:
    original, config, tensors = reference("cohere")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    build = Build(config, tensors)
    model = BridgeDefinition().build(build)
    assert not build.weights.left
    expected = original(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(run(model, [5, 6, 7], [3]), expected, atol=1e-4, rtol=0)


def test_a_missing_tensor_is_named() -> None:
    _, config, tensors = reference("glm4")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        BridgeDefinition().build(Build(config, tensors))


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    return {**config.to_dict(), "architectures": [name]}


def test_definition_is_the_contract() -> None:
    definition: ModelDefinition = BridgeDefinition()
    assert definition.architectures == ()
    config = config_of("glm4", head_dim=16)
    definition.check(config)
    assert definition.max_model_len(config) == 256
    build: ModelBuild = Build(config, {})
    assert isinstance(build, ModelBuild)


ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("mamba"), ["MambaForCausalLM", "recurrent"]),
        (config_of("falcon"), ["FalconForCausalLM", "code of its own"]),
        (config_of("llama4_text"), ["Llama4ForCausalLM", "chunked_attention", "sliding_attention"]),
        (config_of("llama", rope_parameters=ROPE), ["LlamaForCausalLM", "dynamic", "disturb"]),
        ({**config_of("llama"), "quantization_config": {"bits": 4}}, ["LlamaForCausalLM", "quantized"]),
        ({**config_of("llama"), "is_encoder_decoder": True}, ["LlamaForCausalLM", "encoder"]),
        ({**config_of("llama"), "vocab_size": "many"}, ["LlamaForCausalLM", "vocab_size"]),
        ({"architectures": ["T5ForConditionalGeneration"]}, ["T5ForConditionalGeneration", "decoder-only"]),
        ({"architectures": ["NobodysModel"]}, ["NobodysModel", "transformers"]),
        ({}, ["None", "decoder-only"]),
    ],
)
def test_check_refuses_with_architecture_and_reason(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        BridgeDefinition().check(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        (
            "deepseek_v3",
            ["DeepseekV3ForCausalLM", "heads of different sizes: queries 192, keys 192, values 128"],
        ),
        ("doge", ["DogeForCausalLM", "mask by itself"]),
        ("diffllama", ["DiffLlamaForCausalLM", "attends twice"]),
    ],
)
def test_build_refuses_before_weights_are_read(model_type: str, words: list[str]) -> None:
    build = Build(config_of(model_type), {})
    with pytest.raises(CheckpointError) as caught:
        BridgeDefinition().build(build)
    assert not build.products
    for word in words:
        assert word in str(caught.value)


def test_another_attention_than_declared_is_refused() -> None:
    _, config, tensors = reference("glm4")
    model: Any = BridgeDefinition().build(Build(config, tensors))
    model._base.layers[1].self_attn.scaling = 0.5
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn asks for another attention.*scale=0\.5"):
        run(model, [1, 2, 3], [3])


class Mixing:
    """A model whose tokens meet beside the attention, or that counts places instead of positions."""

    hidden_size = 8

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def forward(self, x: torch.Tensor, positions: torch.Tensor, ctx: Any) -> Any:
        if self.kind == "convolution":
            return x + F.pad(x, (0, 0, 1, 0))[:-1], {}
        if self.kind == "places":
            return x * (1 + torch.arange(len(x)))[:, None], {}
        return x * (1 + positions)[:, None], {}


def test_tokens_that_meet_elsewhere_are_found() -> None:
    like = torch.empty(0)
    for kind in ("convolution", "places"):
        with pytest.raises(CheckpointError, match=r"SomeModel .* other ways than attention"):
            check_tokens_stand_alone(Mixing(kind), "SomeModel", like)  # type: ignore[arg-type]
    check_tokens_stand_alone(Mixing("none"), "SomeModel", like)  # type: ignore[arg-type]
