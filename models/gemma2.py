"""Gemma 2: every other layer sees a window only; scores and logits are capped softly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import Model, ModelBuild
from headrace.models.gemma_layers import GemmaConfig, GemmaModel, read_gemma
from headrace.models.rope import read_rope

__all__ = ["Gemma2Definition"]


def _read(config: Mapping[str, Any]) -> GemmaConfig:
    rope = read_rope(config)
    return read_gemma(config, period=2, full_rope=rope, window_rope=rope, caps=(50.0, 30.0), qk_norm=False)


class Gemma2Definition:
    """Gemma 2, as registered."""

    architectures: tuple[str, ...] = ("Gemma2ForCausalLM",)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        _read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return _read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return GemmaModel(build, _read(build.config))
