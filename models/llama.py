"""Llama 2 and 3, SmolLM2 and the many models that share their architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import flag
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder

__all__ = ["LlamaDefinition"]


class LlamaDefinition(DecoderDefinition):
    """Llama, as registered."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        bias = flag(config, "attention_bias", False)
        return read_decoder(config, qkv_bias=bias, out_bias=bias, mlp_bias=flag(config, "mlp_bias", False))
