"""From GGUF's words to those of Hugging Face's config.json and tensor names, by a table of architectures.

To add a family, add an `Architecture` to `ARCHITECTURES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.models.gguf.reader import Header

__all__ = [
    "ARCHITECTURES",
    "FREQUENCY_FACTORS",
    "Architecture",
    "architecture_of",
    "model_config",
    "tensor_name",
]

FREQUENCY_FACTORS = "model.rotary_emb.freq_factors"
"""GGUF's `rope_freqs.weight`, [D / 2]: what the rotary frequencies are divided by (Llama 3.1 and later). GGUF keeps
these in place of Hugging Face's `rope_scaling`; a model that does not take them would be wrong at every position."""


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str
    hf_class: str
    sizes: Mapping[str, str]
    """Whole numbers ≥ 1 it must have: config key → GGUF key without the architecture."""
    tensors: Mapping[str, str]
    """Of the whole model: GGUF name → Hugging Face name."""
    layer_tensors: Mapping[str, str]
    """Of a layer: `attn_q` → `self_attn.q_proj`; `.weight` and `.bias` are kept."""
    permuted: Mapping[str, str]
    """Layer tensors whose rows GGUF stores for interleaved rotation → the config key with their number of heads."""


_DECODER_SIZES = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
    }
)

_DECODER_TENSORS = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "rope_freqs.weight": FREQUENCY_FACTORS,
    }
)

_DECODER_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            model_type="llama",
            hf_class="LlamaForCausalLM",
            sizes=_DECODER_SIZES,
            tensors=_DECODER_TENSORS,
            layer_tensors=_DECODER_LAYER,
            permuted=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
        ),
        "qwen2": Architecture(
            model_type="qwen2",
            hf_class="Qwen2ForCausalLM",
            sizes=_DECODER_SIZES,
            tensors=_DECODER_TENSORS,
            layer_tensors=_DECODER_LAYER,
            permuted=MappingProxyType({}),
        ),
        "qwen3": Architecture(
            model_type="qwen3",
            hf_class="Qwen3ForCausalLM",
            sizes=_DECODER_SIZES,
            tensors=_DECODER_TENSORS,
            layer_tensors=MappingProxyType(
                {**_DECODER_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
            ),
            permuted=MappingProxyType({}),
        ),
    }
)
"""By `general.architecture`."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([^.]+)(?:\.(weight|bias))?")


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> Architecture:
    """Return the file's architecture. Raises `CheckpointError` listing the known ones."""
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise CheckpointError(
            f"{path}: general.architecture is {name!r}; GGUF architectures known: {', '.join(ARCHITECTURES)}"
        )
    return known


def tensor_name(architecture: Architecture, name: str) -> tuple[str, str | None]:
    """Return (Hugging Face's name, config key with the number of heads whose rows are permuted, or None).

    A name the table does not know stays as it is, to be reported as left over once the model is built.
    """
    if name in architecture.tensors:
        return architecture.tensors[name], None
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in architecture.layer_tensors:
        return name, None
    own = architecture.layer_tensors[match[2]]
    kind = "" if own.endswith("inv_freq") else f".{match[3]}"
    return f"model.layers.{match[1]}.{own}{kind}", architecture.permuted.get(match[2])


class _Keys:
    """The file's keys, checked as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.prefix = str(metadata["general.architecture"])

    def get(self, key: str, what: str, good: Callable[[Any], bool]) -> Any:
        """Return a key's value, None where it is missing."""
        full = f"{self.prefix}.{key}"
        value = self.metadata.get(full)
        if value is not None and not good(value):
            raise CheckpointError(f"{self.path}: the key {full} must be {what}, got {value!r}")
        return value

    def size(self, key: str) -> int | None:
        value: int | None = self.get(key, "a whole number of at least 1", lambda v: type(v) is int and v >= 1)
        return value

    def real(self, key: str) -> float | None:
        value: float | None = self.get(
            key, "a number above 0", lambda v: type(v) in (int, float) and 0 < v < float("inf")
        )
        return value

    def text(self, key: str) -> str | None:
        value: str | None = self.get(key, "text", lambda v: type(v) is str)
        return value

    def need(self, key: str) -> int:
        value = self.size(key)
        if value is None:
            raise CheckpointError(f"{self.path}: the key {self.prefix}.{key} is missing")
        return value


def model_config(path: Path, header: Header, architecture: Architecture) -> dict[str, Any]:
    """Return the configuration with config.json's keys; keys of our own begin with `_`.

    `_name`: what the file calls itself; `_num_parameters`; `_format`: `"gguf"`.
    Raises `CheckpointError` naming file and key where a key is missing or of a wrong type.
    """
    metadata = header.metadata
    keys = _Keys(path, metadata)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        **{ours: keys.need(theirs) for ours, theirs in architecture.sizes.items()},
    }
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if config["num_hidden_layers"] > len(shapes):
        raise CheckpointError(
            f"{path}: {keys.prefix}.block_count claims {config['num_hidden_layers']} layers, "
            f"but the file has {len(shapes)} tensors"
        )
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.size("attention.head_count_kv") or heads
    config["head_dim"] = keys.size("attention.key_length") or max(1, config["hidden_size"] // heads)
    config["rms_norm_eps"] = keys.real("attention.layer_norm_rms_epsilon") or 1e-5
    embedding = shapes.get("token_embd.weight", ())
    # The table's own size is the truth: vocab_size is an optional key.
    config["vocab_size"] = embedding[0] if len(embedding) == 2 else keys.need("vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes or "blk.0.attn_output.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    config.update(_rotary(keys, config["head_dim"]))
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if type(metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is int:
            config[ours] = metadata[f"tokenizer.ggml.{theirs}_token_id"]
    config["_name"] = str(metadata.get("general.name") or path.stem)
    config["_num_parameters"] = sum(
        t.nbytes // t.encoding.bytes * t.encoding.elements for t in header.tensors
    )
    config["_format"] = "gguf"
    return config


def _rotary(keys: _Keys, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": keys.real("rope.freq_base") or 10000.0}
    rotated = keys.size("rope.dimension_count") or head_dim
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind, factor = keys.text("rope.scaling.type"), keys.real("rope.scaling.factor")
    if kind is None and keys.real("rope.scale_linear") not in (None, 1.0):
        kind, factor = "linear", keys.real("rope.scale_linear")
    if kind is not None and kind != "none":
        scaling: dict[str, Any] = {"rope_type": kind}
        if factor is not None:
            scaling["factor"] = factor
        original = keys.size("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        found["rope_scaling"] = scaling
    return found
