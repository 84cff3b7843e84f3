"""OLMo 2 and 3: norms behind attention and feed-forward, queries and keys normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.config_fields import flag, positive_int
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder
from headrace.models.decoder_config import LAYER_TYPES, read_layer_types, read_window
from headrace.models.rope import read_rope

__all__ = ["Olmo2Definition", "Olmo3Definition"]


def _read(config: Mapping[str, Any], **changes: Any) -> DecoderConfig:
    bias = flag(config, "attention_bias", False)
    return read_decoder(
        config,
        default_eps=1e-5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="all",
        norms_behind=True,
        **changes,
    )


class Olmo2Definition(DecoderDefinition):
    """OLMo 2, as registered."""

    architectures: tuple[str, ...] = ("Olmo2ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        return _read(config)


class Olmo3Definition(DecoderDefinition):
    """OLMo 3, as registered: every fourth layer sees everything, and only its context is stretched."""

    architectures: tuple[str, ...] = ("Olmo3ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        num_layers = positive_int(config, "num_hidden_layers")
        types = read_layer_types(
            config, tuple(LAYER_TYPES[(index + 1) % 4 != 0] for index in range(num_layers))
        )
        window = read_window(config, 4096)
        unscaled = {**config, "rope_scaling": None}
        ropes = {
            kind: read_rope(config if kind == "full_attention" else unscaled, kind, default_theta=5e5)
            for kind in LAYER_TYPES
        }
        return _read(
            config,
            default_theta=5e5,
            ropes=tuple(ropes[kind] for kind in types),
            windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        )
