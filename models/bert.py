"""BERT's encoder: every token sees the whole text, and the hidden states are the result.

A checkpoint of the bare encoder (`BertModel`) or of the masked language model around it; the heads on top, the pooler
of the first and the predictions of the second, are set aside. There is one segment, as in every use by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import CheckpointError, EngineError
from headrace.core.interfaces import ForwardContext, Model, ModelBuild
from headrace.models.config_fields import choice, flag, positive_float, positive_int
from headrace.models.layers import require_whole_model, set_aside

__all__ = ["BertConfig", "BertDefinition", "BertModel"]


@dataclass(frozen=True)
class BertConfig:
    """A configuration, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_model_len: int
    num_segments: int
    eps: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read the keys of a config.json. Raises `CheckpointError` naming the field that is wrong."""
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        if hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size ({hidden_size}) in the model's configuration must be a multiple of "
                f"num_attention_heads ({num_heads})"
            )
        choice(config, "hidden_act", ("gelu",), "gelu")
        choice(config, "position_embedding_type", ("absolute",), "absolute")
        for field in ("is_decoder", "add_cross_attention"):
            if flag(config, field, False):
                raise CheckpointError(
                    f"{field} in the model's configuration is true; only encoders are supported, where it is false"
                )
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            max_model_len=positive_int(config, "max_position_embeddings"),
            num_segments=positive_int(config, "type_vocab_size", 2),
            eps=positive_float(config, "layer_norm_eps", 1e-12),
        )


class BertModel:
    """A built encoder. It has no logits."""

    def __init__(self, build: ModelBuild, config: BertConfig) -> None:
        require_whole_model(build, config.num_layers)
        self.vocab_size = config.vocab_size
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in build.weights else ""
        name, hidden = f"{prefix}embeddings", config.hidden_size
        take = build.weights.take
        self._embedding_op = build.op("embedding")
        self._words = take(f"{name}.word_embeddings.weight", (config.vocab_size, hidden))
        self._segment = take(f"{name}.token_type_embeddings.weight", (config.num_segments, hidden))[0]
        self._positions = take(f"{name}.position_embeddings.weight", (config.max_model_len, hidden))
        self._norm = _Norm(build, f"{name}.LayerNorm", config)
        self._layers = [
            _Layer(build, f"{prefix}encoder.layer.{index}", config) for index in range(config.num_layers)
        ]
        _set_heads_aside(build, prefix, config)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]: the words alone; `forward` adds segment and position."""
        x: torch.Tensor = self._embedding_op(ids, self._words)
        return x

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """X [N, C], positions [N] -> ([N, C] after the last layer, no taps)."""
        x = x + self._segment + self._embedding_op(positions, self._positions)
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, ctx)
        return x, {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise `EngineError`: nothing can be drawn from an encoder."""
        raise EngineError("this model is an encoder: it has no logits, only hidden states; use embed")


class _Norm:
    """Layer normalization with its weights; `NAME.gamma` and `NAME.beta` are old words for them."""

    def __init__(self, build: ModelBuild, name: str, config: BertConfig) -> None:
        shape = (config.hidden_size,)
        weight, bias = ("gamma", "beta") if f"{name}.gamma" in build.weights else ("weight", "bias")
        self._op = build.op("layer_norm")
        self._weight = build.weights.take(f"{name}.{weight}", shape)
        self._bias = build.weights.take(f"{name}.{bias}", shape)
        self._eps = config.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        normed: torch.Tensor = self._op(x, self._weight, self._bias, self._eps)
        return normed


class _Layer:
    """Attention over the whole text and a feed-forward, each added to what came in and then normed."""

    def __init__(self, build: ModelBuild, name: str, config: BertConfig) -> None:
        hidden, heads = config.hidden_size, config.num_heads
        head_dim = hidden // heads
        self._shape = (-1, heads, head_dim)
        attention = f"{name}.attention"
        self._qkv = build.linear(
            *(f"{attention}.self.{part}" for part in ("query", "key", "value")),
            in_features=hidden,
            out_features=(hidden, hidden, hidden),
            bias=True,
        )
        spec = build.attention_spec(num_heads=heads, num_kv_heads=heads, head_dim=head_dim, causal=False)
        self._attention = build.attention(f"{attention}.self", spec, scale=head_dim**-0.5)
        self._out = build.linear(
            f"{attention}.output.dense", in_features=hidden, out_features=(hidden,), bias=True
        )
        self._attention_norm = _Norm(build, f"{attention}.output.LayerNorm", config)
        self._gelu = build.op("gelu")
        self._up = build.linear(
            f"{name}.intermediate.dense",
            in_features=hidden,
            out_features=(config.intermediate_size,),
            bias=True,
        )
        self._down = build.linear(
            f"{name}.output.dense", in_features=config.intermediate_size, out_features=(hidden,), bias=True
        )
        self._norm = _Norm(build, f"{name}.output.LayerNorm", config)

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        q, k, v = (part.contiguous().view(self._shape) for part in self._qkv(x).chunk(3, dim=-1))
        x = self._attention_norm(self._out(ctx.attend(self._attention, q, k, v)) + x)
        return self._norm(self._down(self._gelu(self._up(x))) + x)


def _set_heads_aside(build: ModelBuild, prefix: str, config: BertConfig) -> None:
    """Take what stands on top of the encoder, and the table of positions 0, 1, 2, … that old files carry."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.position_ids": (1, config.max_model_len),
        f"{prefix}pooler.dense.weight": (hidden, hidden),
        f"{prefix}pooler.dense.bias": (hidden,),
        "cls.predictions.bias": (vocab,),
        "cls.predictions.decoder.weight": (vocab, hidden),
        "cls.predictions.decoder.bias": (vocab,),
        "cls.predictions.transform.dense.weight": (hidden, hidden),
        "cls.predictions.transform.dense.bias": (hidden,),
        **{
            f"cls.predictions.transform.LayerNorm.{word}": (hidden,)
            for word in ("weight", "bias", "gamma", "beta")
        },
        "cls.seq_relationship.weight": (2, hidden),
        "cls.seq_relationship.bias": (2,),
    }
    for name, shape in shapes.items():
        set_aside(build, name, shape)


class BertDefinition:
    """BERT, as registered."""

    architectures: tuple[str, ...] = ("BertModel", "BertForMaskedLM")

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        BertConfig.read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for: there are no positions beyond."""
        return BertConfig.read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return BertModel(build, BertConfig.read(build.config))
