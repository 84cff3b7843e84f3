"""The decoder that Llama's relatives share: what varies between them is a field of its configuration.

Rotary positions, RMSNorm, SiLU-gated feed-forward, grouped query heads. A family's own file reads the spelling of its
config.json into a `DecoderConfig`; the layers are put together from `headrace.models.layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.interfaces import ForwardContext, Model, ModelBuild
from headrace.models.decoder_config import DecoderConfig, read_decoder, read_windows
from headrace.models.layers import (
    AttentionShape,
    DecoderLayer,
    GatedMLP,
    Normed,
    Part,
    PlainLayer,
    QKNorms,
    Rotation,
    Scaled,
    SelfAttention,
    embedding_and_head,
    require_whole_model,
    set_aside,
)
from headrace.models.rope import cos_sin_table

__all__ = ["DecoderConfig", "DecoderDefinition", "DecoderModel", "read_decoder", "read_windows"]

_FREQUENCY_FACTORS = "model.rotary_emb.freq_factors"
"""What GGUF files of Llama 3.1 and later carry in place of a `rope_scaling`."""


class DecoderDefinition(ABC):
    """An architecture served by `DecoderModel`, as registered: it has its names and reads its configuration."""

    architectures: tuple[str, ...] = ()

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration. Raises `CheckpointError` naming the field that is wrong."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        self.read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return self.read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return DecoderModel(build, self.read(build.config))


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
        self._embedding_scale = config.embedding_scale
        self._logits_scale = config.logits_scale
        self._add_rms_norm = build.op("add_rms_norm")
        tied = "lm_head.weight" not in build.weights if config.tied is None else config.tied
        self._embed, self._head = embedding_and_head(
            build, "model.embed_tokens", config.vocab_size, config.hidden_size, tied=tied
        )
        rotations = _rotations(build, config)
        self._layers = [_layer(build, index, config, rotations[index]) for index in range(config.num_layers)]
        self._norm = build.weights.take("model.norm.weight", (config.hidden_size,))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        x = self._embed(ids)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

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
        scores: torch.Tensor = self._head(hidden).float()
        return scores if self._logits_scale == 1.0 else scores * self._logits_scale


def _rotations(build: ModelBuild, config: DecoderConfig) -> list[Rotation | None]:
    """Return each layer's rotation; layers that turn alike share one table."""
    factors = None
    if _FREQUENCY_FACTORS in build.weights:
        rotated = {rope.rotated(config.head_dim) for rope in config.ropes if rope is not None}
        factors = build.weights.take(_FREQUENCY_FACTORS, (max(rotated, default=config.head_dim) // 2,))
    tables = {
        rope: Rotation(
            build, cos_sin_table(rope, config.head_dim, build.max_model_len, build.device, factors)
        )
        for rope in set(config.ropes)
        if rope is not None
    }
    return [None if rope is None else tables[rope] for rope in config.ropes]


def _layer(
    build: ModelBuild, index: int, config: DecoderConfig, rotation: Rotation | None
) -> DecoderLayer | PlainLayer:
    name = f"model.layers.{index}"
    # Early checkpoints carry the rotary frequencies, which follow from the configuration.
    set_aside(build, f"{name}.self_attn.rotary_emb.inv_freq", (config.head_dim // 2,))
    attention: Part = _attention(build, f"{name}.self_attn", index, config, rotation)
    mlp: Part = GatedMLP(
        build,
        f"{name}.mlp",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        bias=config.mlp_bias,
    )
    sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "eps": config.eps}
    if config.norms_behind:
        attention = Normed(build, f"{name}.post_attention_layernorm", attention, **sizes)
        mlp = Normed(build, f"{name}.post_feedforward_layernorm", mlp, **sizes)
    if config.residual_scale != 1.0:
        attention, mlp = (Scaled(build, part, config.residual_scale) for part in (attention, mlp))
    if config.norms_behind:
        return PlainLayer(build, attention=attention, mlp=mlp)
    return DecoderLayer(build, name, attention=attention, mlp=mlp, **sizes)


def _attention(
    build: ModelBuild, name: str, index: int, config: DecoderConfig, rotation: Rotation | None
) -> SelfAttention:
    shape = AttentionShape(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        window=config.windows[index],
    )
    norms = None
    if config.qk_norm is not None:
        q_heads, k_heads = (1, 1) if config.qk_norm == "head" else (config.num_heads, config.num_kv_heads)
        norms = QKNorms(
            build,
            name,
            q_size=q_heads * config.head_dim,
            k_size=k_heads * config.head_dim,
            eps=config.eps,
        )
    return SelfAttention(build, name, shape, rotation=rotation, norms=norms)
