"""From GGUF's keys to those of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.models.gguf.architectures import Architecture
from headrace.models.gguf.reader import Header

__all__ = ["model_config"]


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
    config.update(_rotary(keys, config["head_dim"], architecture))
    config.update(_own(keys, config, architecture))
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if type(metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is int:
            config[ours] = metadata[f"tokenizer.ggml.{theirs}_token_id"]
    config["_name"] = str(metadata.get("general.name") or path.stem)
    config["_num_parameters"] = sum(
        t.nbytes // t.encoding.bytes * t.encoding.elements for t in header.tensors
    )
    config["_format"] = "gguf"
    return config


def _own(keys: _Keys, config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return what only some architectures have."""
    found = dict(architecture.fixed)
    found |= {ours: keys.size(theirs) for ours, theirs in architecture.optional_sizes.items()}
    found |= {ours: keys.real(theirs) for ours, theirs in architecture.optional_reals.items()}
    found = {key: value for key, value in found.items() if value is not None}
    if architecture.windowed is not None and "sliding_window" in found:
        found["model_type"], hf_class = architecture.windowed
        found["architectures"] = [hf_class]
    if config["num_hidden_layers"] in architecture.scale_by_hidden:
        # The files do not say it: the largest models of these families differ, and are known by their depth.
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    return found


def _rotary(keys: _Keys, head_dim: int, architecture: Architecture) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": keys.real("rope.freq_base") or architecture.rope_theta}
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
