"""What tests of adapters share: a tiny base model, adapters in PEFT's format, and the merged model as the judge."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

TIE = 1e-3
VOCAB = 131
HIDDEN, INNER, Q, KV = 64, 96, 64, 32
LAYERS = 2
SHAPES: dict[str, tuple[int, int]] = {
    "self_attn.q_proj": (HIDDEN, Q),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (Q, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Inputs and outputs of what adapters usually aim at."""


def write_adapter(
    folder: Path,
    rank: int,
    *,
    seed: int = 0,
    targets: Sequence[str] = tuple(SHAPES),
    scale: float = 0.6,
    embeddings: bool = False,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random adapter of the base model; `embeddings`: of the lookup and the output projection, too."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * (scale / shape[-1] ** 0.5)).to(dtype)

    modules = {
        f"model.layers.{layer}.{target}": SHAPES[target] for layer in range(LAYERS) for target in targets
    }
    tensors: dict[str, torch.Tensor] = {}
    patterns = config.get("rank_pattern", {})
    for name, (inputs, outputs) in modules.items():
        own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = draw(own, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = draw(outputs, own)
    if embeddings:
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = draw(rank, VOCAB)
        tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = draw(HIDDEN, rank)
        tensors["base_model.model.lm_head.lora_A.weight"] = draw(rank, HIDDEN)
        tensors["base_model.model.lm_head.lora_B.weight"] = draw(VOCAB, rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def merged(base: Any, folder: Path) -> Any:
    """Return a copy of the base model with an adapter's weights added: written from PEFT's definition alone."""
    import copy
    import math

    model = copy.deepcopy(base)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")

    def pattern(field: str, name: str, default: float) -> float:
        found = (v for k, v in config.get(field, {}).items() if re.match(rf"(.*\.)?({k})$", name))
        return float(next(found, default))

    for key, a in tensors.items():
        if ".lora_A." not in key and not key.endswith("lora_embedding_A"):
            continue
        name = key.removeprefix("base_model.model.").split(".lora_")[0]
        b = tensors[key.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        rank, alpha = (
            pattern("rank_pattern", name, config["r"]),
            pattern("alpha_pattern", name, config["lora_alpha"]),
        )
        factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = (b.float() @ a.float()) * factor
        module = model.get_submodule(name)
        with torch.no_grad():
            module.weight += delta.t() if "embedding" in key else delta
    return model


@dataclass
class Base:
    """The tiny base model: its folder, and transformers' model of it."""

    folder: Path
    model: Any

    def check(self, model: Any, prompt: Sequence[int], given: Sequence[int]) -> bool:
        """Hold a greedy answer to a model by the tie rule; whether it had a tie."""
        tokens, ties = list(prompt), 0
        for token in given:
            with torch.inference_mode():
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            if token != int(best.indices[0]):
                assert float(best.values[0] - best.values[1]) < TIE, (token, best)
                ties += 1
            tokens.append(token)
        return bool(ties)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A random Llama of two layers, saved by transformers; untied."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder)
    return Base(folder, model)


@pytest.fixture(scope="session")
def adapter() -> Callable[..., Path]:
    """The writer of adapters: `adapter(folder, rank, seed=…, …)`."""
    return write_adapter


@pytest.fixture(scope="session")
def merge() -> Callable[[Any, Path], Any]:
    """The judge: `merge(model, folder)`."""
    return merged
