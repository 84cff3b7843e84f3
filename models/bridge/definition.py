"""The bridge as a model definition: the one for architectures that have no file here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Model, ModelBuild
from headrace.models.bridge.library import causal_class, model_config, require_library
from headrace.models.layers import require_whole_model

__all__ = ["BridgeDefinition"]

_LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class BridgeDefinition:
    """Any decoder of transformers whose attention goes through its attention interface."""

    architectures: tuple[str, ...] = ()
    """None: it is chosen by name, or where no other definition serves."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` saying why the configuration is none the bridge can build."""
        _known(config)

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        cls, known = _known(config)
        for field in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
            length = getattr(known, field, None)
            if isinstance(length, int) and length > 1:
                return length
        raise CheckpointError(
            f"{cls.__name__}: the model's configuration does not say how many tokens it was made for "
            "(max_position_embeddings)"
        )

    def build(self, build: ModelBuild) -> Model:
        """Rehearse the model without weights, then build and load it."""
        cls, known = _known(build.config)
        require_whole_model(build, known.num_hidden_layers)
        from headrace.models.bridge.alone import check_tokens_stand_alone
        from headrace.models.bridge.model import BridgeModel
        from headrace.models.bridge.probe import probe_model

        probed = probe_model(cls, known, build.max_model_len)
        # A rehearsal leaves its marks on a configuration: the model gets a fresh one.
        model = BridgeModel(build, cls, model_config(cls, build.config), probed)
        check_tokens_stand_alone(model, cls.__name__, torch.empty(0, dtype=build.dtype, device=build.device))
        return model


def _known(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class and its configuration. Raises `CheckpointError` for what the bridge cannot serve."""
    transformers = require_library()
    cls = causal_class(config)
    if cls is None:
        stated = config.get("architectures")
        raise CheckpointError(
            f"transformers {transformers.__version__} has no decoder-only model for the architectures {stated!r}; "
            "model_impl='transformers' serves what AutoModelForCausalLM does"
        )
    reason = _why_not(cls, config)
    if not reason:
        known = model_config(cls, config)
        reason = _why_not_config(known)
    if reason:
        raise CheckpointError(
            f"{cls.__name__} cannot run through transformers' attention interface: {reason}"
        )
    return cls, known


def _why_not(cls: Any, config: Mapping[str, Any]) -> str:
    if config.get("quantization_config"):
        return "its weights are quantized (quantization_config); use the plain checkpoint"
    if config.get("is_encoder_decoder"):
        return "it has an encoder"
    if getattr(cls, "_is_stateful", False):
        return "it has recurrent or linear-attention layers, which keep a state and not keys and values"
    if not cls._can_set_attn_implementation():
        return "its attention is code of its own"
    if cls.config_class.sub_configs:
        return f"it is made of several models ({', '.join(cls.config_class.sub_configs)})"
    return ""


def _why_not_config(known: Any) -> str:
    if getattr(known, "is_encoder_decoder", False):
        return "it has an encoder"
    types = sorted(set(getattr(known, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if types:
        return f"it has layers of the type {', '.join(types)}; supported are {', '.join(_LAYER_TYPES)}"
    if not isinstance(getattr(known, "num_hidden_layers", None), int):
        return "its configuration does not say how many layers it has (num_hidden_layers)"
    rope = getattr(known, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            return (
                f"its rotary frequencies ({one['rope_type']}) change with the longest request of a step, so that "
                "requests would disturb each other"
            )
    return ""
