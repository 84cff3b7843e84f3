"""Gemma 3, text: five window layers to one that sees everything, each kind with its own rotary base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Model, ModelBuild
from headrace.models.config_fields import positive_int
from headrace.models.gemma_layers import GemmaConfig, GemmaModel, read_gemma
from headrace.models.rope import Rope, read_rope

__all__ = ["Gemma3Definition"]


def _read(config: Mapping[str, Any]) -> GemmaConfig:
    return read_gemma(
        config,
        period=positive_int(config, "sliding_window_pattern", 6),
        full_rope=_rope(config, "full_attention", ("rope_theta", 1e6), config.get("rope_scaling")),
        window_rope=_rope(config, "sliding_attention", ("rope_local_base_freq", 1e4), None),
        caps=(None, None),
        qk_norm=True,
    )


def _rope(config: Mapping[str, Any], layers: str, base: tuple[str, float], scaling: Any) -> Rope:
    """Read one of the two kinds of positions: `rope_parameters` holds both, older configurations spell them apart."""
    both = config.get("rope_parameters") or {}
    if not isinstance(both, Mapping) or not set(both) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            "rope_parameters in the model's configuration must be a table with the fields full_attention and "
            f"sliding_attention, got {both!r:.200}"
        )
    field, default = base
    theta = config.get(field)
    flat = {key: value for key, value in config.items() if key != "rope_theta"}
    given = {"rope_parameters": both.get(layers), "rope_scaling": scaling}
    return read_rope({**flat, **given, "rope_theta": default if theta is None else theta})


class Gemma3Definition:
    """Gemma 3's text model, as registered."""

    architectures: tuple[str, ...] = ("Gemma3ForCausalLM",)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        _read(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        return _read(config).max_model_len

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        return GemmaModel(build, _read(build.config))
