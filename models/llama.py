"""Llama 2 and 3, SmolLM2 and the many models that share their architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import Model, ModelBuild
from headrace.models.config_fields import flag
from headrace.models.decoder import DecoderConfig, DecoderModel, read_decoder

__all__ = ["LlamaDefinition"]


def _read(config: Mapping[str, Any]) -> DecoderConfig:
    bias = flag(config, "attention_bias", False)
    return read_decoder(config, qkv_bias=bias, out_bias=bias, mlp_bias=flag(config, "mlp_bias", False))


class LlamaDefinition:
    """Llama, as registered."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        _read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return _read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return DecoderModel(build, _read(build.config))
