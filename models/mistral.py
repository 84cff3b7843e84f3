"""Mistral 7B and its relatives: Llama, in earlier versions with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import Model, ModelBuild
from headrace.models.config_fields import positive_int
from headrace.models.decoder import DecoderConfig, DecoderModel, read_decoder

__all__ = ["MistralDefinition"]


def _read(config: Mapping[str, Any]) -> DecoderConfig:
    window = None
    if config.get("sliding_window") is not None:
        window = positive_int(config, "sliding_window")
    return read_decoder(config, windows=(window,) * positive_int(config, "num_hidden_layers"))


class MistralDefinition:
    """Mistral, as registered."""

    architectures: tuple[str, ...] = ("MistralForCausalLM",)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        _read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return _read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return DecoderModel(build, _read(build.config))
