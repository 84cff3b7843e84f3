"""SmolLM3: Llama in which every fourth layer knows no positions; some layers may see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.models.config_fields import flag, positive_int
from headrace.models.decoder import DecoderConfig, DecoderDefinition, read_decoder
from headrace.models.decoder_config import LAYER_TYPES, read_layer_types, read_window
from headrace.models.rope import read_rope

__all__ = ["SmolLM3Definition"]

_THETA = 2e6


class SmolLM3Definition(DecoderDefinition):
    """SmolLM3, as registered."""

    architectures: tuple[str, ...] = ("SmolLM3ForCausalLM",)

    def read(self, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's configuration."""
        turns = _layers_that_turn(config)
        rope = read_rope(config, default_theta=_THETA)
        bias = flag(config, "attention_bias", False)
        return read_decoder(
            {"tie_word_embeddings": True, **config},
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", False),
            default_theta=_THETA,
            ropes=tuple(rope if turn else None for turn in turns),
            windows=_windows(config, turns),
        )


def _layers_that_turn(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Read `no_rope_layers`, which has 1 for each layer that does turn, or else the interval of those that do not."""
    num_layers = positive_int(config, "num_hidden_layers")
    marks = config.get("no_rope_layers")
    if marks is None:
        interval = positive_int(config, "no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if (
        not isinstance(marks, list | tuple)
        or len(marks) < num_layers
        or not all(mark in (0, 1) for mark in marks)
    ):
        raise CheckpointError(
            f"no_rope_layers in the model's configuration must have 0 or 1 for each of {num_layers} layers, got "
            f"{marks!r:.200}"
        )
    return tuple(bool(mark) for mark in marks[:num_layers])


def _windows(config: Mapping[str, Any], turns: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Where there is a window and `layer_types` does not say, the layers that know no positions have it."""
    window = read_window(config) if flag(config, "use_sliding_window", False) else None
    default = tuple(LAYER_TYPES[window is not None and not turn] for turn in turns)
    types = read_layer_types(config, default)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
