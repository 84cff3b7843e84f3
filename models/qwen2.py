"""Qwen 2 and 2.5: Llama with a bias on queries, keys and values; some layers may see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import Model, ModelBuild
from headrace.models.decoder import DecoderConfig, DecoderModel, read_decoder, read_windows

__all__ = ["Qwen2Definition"]


def _read(config: Mapping[str, Any]) -> DecoderConfig:
    return read_decoder(config, qkv_bias=True, windows=read_windows(config))


class Qwen2Definition:
    """Qwen2, as registered."""

    architectures: tuple[str, ...] = ("Qwen2ForCausalLM",)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        _read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return _read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return DecoderModel(build, _read(build.config))
