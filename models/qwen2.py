"""Qwen 2 and 2.5: Llama with a bias on queries, keys and values; some layers may see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder, read_windows

__all__ = ["Qwen2Definition"]


class Qwen2Definition(DecoderDefinition):
    """Qwen2, as registered."""

    architectures: tuple[str, ...] = ("Qwen2ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        return read_decoder(config, qkv_bias=True, windows=read_windows(config))
