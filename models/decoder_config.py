"""The configuration of a decoder, checked: what Llama's relatives spell alike, and where they may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.errors import CheckpointError
from headrace.models.config_fields import choice, flag, positive_float, positive_int, whole_number
from headrace.models.rope import Rope, read_rope

__all__ = ["LAYER_TYPES", "DecoderConfig", "read_decoder", "read_layer_types", "read_window", "read_windows"]

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Words of `layer_types`: a layer sees every token before it, or a window of them."""


@dataclass(frozen=True)
class DecoderConfig:
    """A configuration, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eps: float
    tied: bool | None
    """Whether the output projection is the embedding; None: not said."""
    ropes: tuple[Rope | None, ...]
    """A layer: how its queries and keys turn; None: they do not."""
    windows: tuple[int | None, ...]
    """A layer: how many tokens its attention sees; None: all."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    """Whether queries and keys are normed before they turn: head by head, or all heads at once."""
    norms_behind: bool = False
    """Whether the norms of a layer are behind attention and feed-forward, and not before them."""
    attention_scale: float | None = None
    """Multiplies Q·K; None: 1 / √head_dim."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and feed-forward add to the residual stream."""
    logits_scale: float = 1.0


def read_decoder(
    config: Mapping[str, Any],
    *,
    default_eps: float = 1e-6,
    default_theta: float = 10000.0,
    **changes: Any,
) -> DecoderConfig:
    """Read the keys that all families spell alike; `changes` are what a family adds.

    Raises `CheckpointError` naming the field that is wrong.
    """
    hidden_size = positive_int(config, "hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(config, hidden_size)
    choice(config, "hidden_act", ("silu", "swish"), "silu")
    tied = config.get("tie_word_embeddings")
    num_layers = positive_int(config, "num_hidden_layers")
    rope = read_rope(config, default_theta=default_theta)
    max_positions = positive_int(config, "max_position_embeddings")
    known: dict[str, Any] = {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_model_len": rope.scaling.reach(max_positions),
        "eps": positive_float(config, "rms_norm_eps", default_eps),
        "tied": None if tied is None else flag(config, "tie_word_embeddings", False),
        "ropes": (rope,) * num_layers,
        "windows": (None,) * num_layers,
    }
    read = DecoderConfig(**(known | changes))
    for one in set(read.ropes) - {None}:
        if one is not None:
            one.frequencies(head_dim, read.max_model_len)
    return read


def _heads(config: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of query and KV heads, and the size of a head."""
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({num_heads}) in the model's configuration must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size ({hidden_size}) in the model's configuration must be a multiple of "
            f"num_attention_heads ({num_heads}) where head_dim is not given"
        )
    head_dim = positive_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(
            f"head_dim in the model's configuration must be even, dimensions rotate in pairs; got {head_dim}"
        )
    return num_heads, num_kv_heads, head_dim


def read_window(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """Return `sliding_window`: `default` where it is not there, None, which is no window, where it is null.

    Raises `CheckpointError` unless it is a whole number of at least 1.
    """
    if config.get("sliding_window", default) is None:
        return None
    return positive_int(config, "sliding_window", default)


def read_layer_types(config: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return `layer_types`, one of `LAYER_TYPES` for each layer.

    Raises `CheckpointError` naming the field if it is something else.
    """
    num_layers = positive_int(config, "num_hidden_layers")
    types = config.get("layer_types")
    types = default if types is None else types
    good = isinstance(types, list | tuple) and len(types) == num_layers
    if not good or not all(kind in LAYER_TYPES for kind in types):
        raise CheckpointError(
            f"layer_types in the model's configuration must name one of {', '.join(LAYER_TYPES)} for each of "
            f"{num_layers} layers, got {types!r:.200}"
        )
    return tuple(types)


def read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read which layers see a window only: `layer_types`, or `max_window_layers` where `use_sliding_window` is set.

    Raises `CheckpointError` naming the field that is wrong.
    """
    num_layers = positive_int(config, "num_hidden_layers")
    first = num_layers
    if flag(config, "use_sliding_window", False):
        first = whole_number(config, "max_window_layers", 28)
    default = tuple(LAYER_TYPES[index >= first] for index in range(num_layers))
    types = read_layer_types(config, default)
    if "sliding_attention" not in types:
        return (None,) * num_layers
    window = positive_int(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
