"""Mistral 7B and its relatives: Llama, in earlier versions with a sliding window on every layer, later on some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import positive_int
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder
from headrace.models.decoder_config import LAYER_TYPES, read_layer_types, read_window

__all__ = ["MinistralDefinition", "MistralDefinition"]

_WINDOW = 4096
"""What the architecture means where the field is not there; null is no window."""


class MistralDefinition(DecoderDefinition):
    """Mistral, as registered."""

    architectures: tuple[str, ...] = ("MistralForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        window = read_window(config, _WINDOW)
        return read_decoder(config, windows=(window,) * positive_int(config, "num_hidden_layers"))


class MinistralDefinition(DecoderDefinition):
    """Ministral, as registered: `layer_types` says which layers have the window."""

    architectures: tuple[str, ...] = ("MinistralForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        window = read_window(config, _WINDOW)
        num_layers = positive_int(config, "num_hidden_layers")
        types = read_layer_types(config, (LAYER_TYPES[window is not None],) * num_layers)
        windows = tuple(window if kind == "sliding_attention" else None for kind in types)
        return read_decoder(config, windows=windows)
