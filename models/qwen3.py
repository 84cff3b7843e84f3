"""Qwen 3: Llama with normed queries and keys; some layers may see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import flag
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder, read_windows

__all__ = ["Qwen3Definition"]


class Qwen3Definition(DecoderDefinition):
    """Qwen3, as registered."""

    architectures: tuple[str, ...] = ("Qwen3ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        bias = flag(config, "attention_bias", False)
        return read_decoder(
            {"head_dim": 128, **config},  # the architecture's, where the file does not say
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            windows=read_windows(config),
        )
