"""Phi-3 and Phi-4-mini: Llama with stacked projections in the checkpoint, divisors for long contexts, and heads that
may be rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import positive_int
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder
from headrace.models.decoder_config import read_window

__all__ = ["Phi3Definition"]


def _with_longrope(section: Any) -> Any:
    # Early files call the same divisors "yarn".
    if isinstance(section, Mapping) and "yarn" in (section.get("rope_type"), section.get("type")):
        return {**section, "rope_type": "longrope"}
    return section


class Phi3Definition(DecoderDefinition):
    """Phi-3, as registered."""

    architectures: tuple[str, ...] = ("Phi3ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        names = ("rope_scaling", "rope_parameters")
        window = read_window(config)
        return read_decoder(
            {**config, **{name: _with_longrope(config.get(name)) for name in names}},
            default_eps=1e-5,
            windows=(window,) * positive_int(config, "num_hidden_layers"),
        )
