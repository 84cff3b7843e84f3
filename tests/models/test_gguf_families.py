"""Every GGUF architecture: a model of transformers, under the names of the format's own library, comes back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.models.gguf.architectures import ARCHITECTURES
from headrace.models.gguf.loader import GGUFCheckpoint, GGUFLoader
from headrace.models.opening import model_definition

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMOOTH = {"long_factor": [float(i + 2) for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}, {}),
    "llama-window": ("MistralConfig", {"sliding_window": 20}, {"attention.sliding_window": 20}),
    "qwen2": ("Qwen2Config", {}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}, {"attention.key_length": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "final_logit_softcapping": 20.0,
            "attn_logit_softcapping": 40.0,
        },
        {
            "attention.key_length": 32,
            "attention.sliding_window": 12,
            "final_logit_softcapping": 20.0,
            "attn_logit_softcapping": 40.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention.key_length": 32,
            "attention.sliding_window": 12,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base": 1e6,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **SMOOTH},
        },
        {"rope.scaling.original_context_length": 64},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.125, "logit_scale": 8.0},
    ),
    "olmo2": ("Olmo2Config", {}, {}),
    "smollm3": ("SmolLM3Config", {"rope_theta": 5e4}, {"rope.freq_base": 5e4}),
}
"""Name → transformers' configuration and its changes, GGUF keys that say the same."""
INTERLEAVED = ("llama", "granite", "smollm3")
"""Architectures whose converter reorders the rows of queries and keys."""
Writer = Callable[..., Path]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield


def reference(family: str) -> Any:
    """A random model of a family, its norms random, too."""
    name, changes, _ = FAMILIES[family]
    with quiet():
        torch.manual_seed(3)
        config = getattr(transformers, name)(**{**SIZES, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def write(path: Path, family: str, model: Any, writer: Writer) -> Path:
    """Write the model as the format's converter does: its names, its order of rows, its 1 added to Gemma's norms."""
    architecture = family.split("-")[0]
    (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, SIZES["num_hidden_layers"])
    config = model.config
    tensors: dict[str, Any] = dict.fromkeys(
        ("token_embd.weight", "output_norm.weight", *(f"blk.{i}.{n}.weight" for i in range(2) for n in TINY))
    )
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().numpy()
        if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape).copy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    if family == "phi3":
        for which in ("long", "short"):
            tensors[f"rope_factors_{which}.weight"] = np.array(SMOOTH[f"{which}_factor"], np.float32)
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        **{f"{architecture}.{key}": value for key, value in FAMILIES[family][2].items()},
    }
    return writer(path, keys, tensors)


TINY = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
"""Layer tensors that the writer of tiny files makes unless told not to."""


def test_every_architecture_is_here() -> None:
    assert {family.split("-")[0] for family in FAMILIES} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_hugging_faces(family: str, tmp_path: Path, tiny_gguf: Writer) -> None:
    model = reference(family)
    checkpoint = GGUFLoader().open(write(tmp_path / "m.gguf", family, model, tiny_gguf))
    expected = dict(model.named_parameters())
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in checkpoint.tensors.items():
        decoded = tensor.decode(torch.float32)
        if "norm" in name and ARCHITECTURES[family.split("-")[0]].norms_plus_one:
            assert torch.allclose(decoded, expected[name], rtol=0, atol=2e-7), name
        else:
            assert torch.equal(decoded, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_hugging_faces(family: str, tmp_path: Path, tiny_gguf: Writer) -> None:
    """Read by transformers' own class, it is the configuration the model was made from."""
    model = reference(family)
    config = GGUFLoader().open(write(tmp_path / "m.gguf", family, model, tiny_gguf)).config
    own = {key: value for key, value in config.items() if key[0] != "_" and key != "model_type"}
    with quiet():
        read = type(model.config)(**own).to_dict()
    expected = model.config.to_dict()
    passed = ("architectures", "dtype", "transformers_version", "initializer_range", "_attn_implementation")
    assert config["model_type"] == model.config.model_type
    assert config["architectures"] == [type(model).__name__]
    for key, value in expected.items():
        if key in passed or key.endswith("_token_id"):
            continue
        same = value == pytest.approx(read[key]) if isinstance(value, float) else value == read[key]
        assert same, (key, value, read[key])


def runs_here(config: Any, registry: Any) -> bool:
    known = {name for entry in registry.entries("model") for name in entry.factory().architectures}
    return set(config["architectures"]) <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_a_definition_accepts_the_configuration(
    family: str, tmp_path: Path, tiny_gguf: Writer, models_registry: Any
) -> None:
    checkpoint = GGUFLoader().open(write(tmp_path / "m.gguf", family, reference(family), tiny_gguf))
    if not runs_here(checkpoint.config, models_registry):
        pytest.skip(f"no definition for {checkpoint.config['architectures']}")
    assert model_definition(checkpoint.config, models_registry).max_model_len(checkpoint.config) == 128


def test_large_gemmas_have_another_query_scale(tmp_path: Path, tiny_gguf: Writer) -> None:
    model = reference("gemma2")
    path = write(tmp_path / "m.gguf", "gemma2", model, tiny_gguf)
    assert "query_pre_attn_scalar" not in GGUFLoader().open(path).config
    raw = path.read_bytes()
    key = b"gemma2.block_count\x04\x00\x00\x00"
    assert raw.count(key) == 1
    path.write_bytes(raw.replace(key + b"\x06", key + b"\x2e"))
    config = GGUFLoader().open(path).config
    assert config["num_hidden_layers"] == 46
    assert config["query_pre_attn_scalar"] == 64 // 4


def test_norms_are_given_without_the_1_and_read_as_stored(tmp_path: Path, tiny_gguf: Writer) -> None:
    model = reference("gemma3")
    checkpoint: GGUFCheckpoint = GGUFLoader().open(write(tmp_path / "m.gguf", "gemma3", model, tiny_gguf))
    tensor = checkpoint.tensors["model.layers.1.self_attn.q_norm.weight"]
    stored = tensor.read().view(torch.float32).reshape(-1)
    assert torch.equal(tensor.decode(torch.float32), stored - 1)
    assert torch.equal(tensor.decode(torch.bfloat16), (stored - 1).bfloat16())
    assert torch.equal(tensor.decode(torch.float32, slice(3, 9)), stored[3:9] - 1)
