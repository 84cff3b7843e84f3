"""The decoder that Llama's relatives share: what varies between them is a field of its configuration.

Rotary positions, RMSNorm before attention and feed-forward, SiLU-gated feed-forward, grouped query heads. A family's
own file reads the spelling of its config.json into a `DecoderConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import ForwardContext, ModelBuild
from headrace.models.config_fields import choice, flag, positive_float, positive_int
from headrace.models.layers import (
    AttentionShape,
    DecoderLayer,
    GatedMLP,
    SelfAttention,
    require_whole_model,
    set_aside,
)
from headrace.models.rope import Rope, cos_sin_table, read_rope

FREQUENCY_FACTORS = "model.rotary_emb.freq_factors"
"""What GGUF files of Llama 3.1 and later carry in place of a `rope_scaling`."""

__all__ = ["DecoderConfig", "DecoderModel", "read_decoder", "read_windows"]


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
    rope: Rope
    tied: bool | None
    """Whether the output projection is the embedding; None: not said."""
    windows: tuple[int | None, ...]
    """A layer: how many tokens its attention sees; None: all."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head, before they are rotated."""


def read_decoder(config: Mapping[str, Any], **changes: Any) -> DecoderConfig:
    """Read the keys that all families spell alike; `changes` are what a family adds.

    Raises `CheckpointError` naming the field that is wrong.
    """
    hidden_size = positive_int(config, "hidden_size")
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
    choice(config, "hidden_act", ("silu", "swish"), "silu")
    tied = config.get("tie_word_embeddings")
    num_layers = positive_int(config, "num_hidden_layers")
    known: dict[str, Any] = {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_model_len": positive_int(config, "max_position_embeddings"),
        "eps": positive_float(config, "rms_norm_eps", 1e-6),
        "rope": read_rope(config),
        "tied": None if tied is None else flag(config, "tie_word_embeddings", False),
        "windows": (None,) * num_layers,
    }
    return DecoderConfig(**(known | changes))


def read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read which layers see a window only: `layer_types`, or `max_window_layers` where `use_sliding_window` is set.

    Raises `CheckpointError` naming the field that is wrong.
    """
    num_layers = positive_int(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        first = num_layers
        if flag(config, "use_sliding_window", False):
            first = positive_int(config, "max_window_layers", num_layers)
        types = ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, (list, tuple)) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(
            f"layer_types in the model's configuration must name one of {', '.join(known)} for each of {num_layers} "
            f"layers, got {types!r:.200}"
        )
    if "sliding_attention" not in types:
        return (None,) * num_layers
    window = positive_int(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


class DecoderModel:
    """A built decoder.

    taps: layers whose hidden states (what the next layer gets, before its norm) `forward` returns as well;
    empty unless somebody who needs them sets it.
    """

    def __init__(self, build: ModelBuild, config: DecoderConfig) -> None:
        require_whole_model(build, config.num_layers)
        self.vocab_size = config.vocab_size
        self.taps: frozenset[int] = frozenset()
        self._eps = config.eps
        self._embedding_op = build.op("embedding")
        self._add_rms_norm = build.op("add_rms_norm")
        self._embedding = build.weights.take(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        factors = None
        if FREQUENCY_FACTORS in build.weights:
            factors = build.weights.take(FREQUENCY_FACTORS, (config.head_dim // 2,))
        cos_sin = cos_sin_table(config.rope, config.head_dim, build.max_model_len, build.device, factors)
        self._layers = [_layer(build, index, config, cos_sin) for index in range(config.num_layers)]
        self._norm = build.weights.take("model.norm.weight", (config.hidden_size,))
        self._head = self._output_projection(build, config)

    def _output_projection(self, build: ModelBuild, config: DecoderConfig) -> Any:
        tied = "lm_head.weight" not in build.weights if config.tied is None else config.tied
        if tied:
            set_aside(build, "lm_head.weight", (config.vocab_size, config.hidden_size))
        return build.lm_head(
            "lm_head", self._embedding if tied else None, config.vocab_size, config.hidden_size
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        x: torch.Tensor = self._embedding_op(ids, self._embedding)
        return x

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """X [N, C], positions [N] -> ([N, C] after the last norm, hidden states of tapped layers)."""
        residual: torch.Tensor | None = None
        taps: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, positions, ctx)
            if index in self.taps:
                taps[index] = x + residual
        hidden, _ = self._add_rms_norm(x, residual, self._norm, self._eps)
        return hidden, taps

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        scores: torch.Tensor = self._head(hidden)
        return scores.float()


def _layer(build: ModelBuild, index: int, config: DecoderConfig, cos_sin: torch.Tensor) -> DecoderLayer:
    name = f"model.layers.{index}"
    shape = AttentionShape(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        window=config.windows[index],
        qk_norm_eps=config.eps if config.qk_norm else None,
    )
    # Early checkpoints carry the rotary frequencies, which follow from the configuration.
    set_aside(build, f"{name}.self_attn.rotary_emb.inv_freq", (config.head_dim // 2,))
    return DecoderLayer(
        build,
        name,
        attention=SelfAttention(build, f"{name}.self_attn", shape, cos_sin),
        mlp=GatedMLP(
            build,
            f"{name}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            bias=config.mlp_bias,
        ),
        hidden_size=config.hidden_size,
        eps=config.eps,
    )
