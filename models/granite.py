"""Granite 3: Llama with multipliers on embeddings, attention, residual stream and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import flag, positive_float
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder

__all__ = ["GraniteDefinition"]


class GraniteDefinition(DecoderDefinition):
    """Granite, as registered."""

    architectures: tuple[str, ...] = ("GraniteForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        bias = flag(config, "attention_bias", False)
        return read_decoder(
            config,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", False),
            embedding_scale=positive_float(config, "embedding_multiplier", 1.0),
            attention_scale=positive_float(config, "attention_multiplier", 1.0),
            residual_scale=positive_float(config, "residual_multiplier", 1.0),
            logits_scale=1.0 / positive_float(config, "logits_scaling", 1.0),
        )
