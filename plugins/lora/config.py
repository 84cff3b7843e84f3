"""What an adapter_config.json says: ranks and factors by module, and what of PEFT is not computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.core.errors import RequestError

__all__ = ["PeftConfig", "read_config"]

_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` by which the base model's weights were changed as well."""

_UNSUPPORTED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "use_dora": (bool, "DoRA, which scales the base model's weights"),
        "use_qalora": (bool, "QA-LoRA, which pools inputs"),
        "bias": (lambda value: value not in (None, "none"), "trained biases"),
        "lora_bias": (bool, "biases of its own (lora_bias)"),
        "alora_invocation_tokens": (bool, "activated LoRA (aLoRA), which begins in the middle of a prompt"),
        "layer_replication": (bool, "replicated layers"),
        "modules_to_save": (bool, "whole modules beside the low-rank ones (modules_to_save)"),
        "target_parameters": (bool, "parameters that are no modules (target_parameters)"),
        "trainable_token_indices": (bool, "trained rows of the embedding (trainable_token_indices)"),
        "megatron_config": (bool, "Megatron's layers"),
        "arrow_config": (bool, "Arrow, which routes between adapters"),
        "velora_config": (bool, "VeLoRA"),
        "monteclora_config": (bool, "MonteCLoRA"),
    }
)


@dataclass(frozen=True)
class PeftConfig:
    """The fields that decide what an adapter computes."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def factor_of(self, module: str) -> float:
        """What B · A is multiplied with."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that is the module's name, or an end of it behind a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_config(config: Mapping[str, Any], where: str, max_rank: int) -> PeftConfig:
    """Check a configuration. Raises `RequestError` naming the field and what is allowed."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _wrong(where, f"peft_type is {kind!r:.50}; only LORA is supported")
    for field, (is_used, what) in _UNSUPPORTED.items():
        if is_used(config.get(field)):
            raise _wrong(
                where,
                f"{field} {config[field]!r:.100} asks for {what}, which is not supported; train without it",
            )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_OTHER_BASES):
        raise _wrong(
            where,
            f"init_lora_weights {init!r:.50} changed the base model's weights as well, so the adapter alone is not "
            "the model; PEFT can convert it when it is saved (path_initial_model_for_weight_conversion)",
        )
    return PeftConfig(
        _rank(where, "r", config.get("r", 8), max_rank),
        _number(where, "lora_alpha", config.get("lora_alpha", 8)),
        bool(config.get("use_rslora")),
        {
            pattern: _rank(where, f"rank_pattern[{pattern!r:.100}]", value, max_rank)
            for pattern, value in _patterns(where, config, "rank_pattern").items()
        },
        {
            pattern: _number(where, f"alpha_pattern[{pattern!r:.100}]", value)
            for pattern, value in _patterns(where, config, "alpha_pattern").items()
        },
    )


def _patterns(where: str, config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise _wrong(where, f"{field} must map patterns to numbers, got {patterns!r:.100}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _wrong(where, f"{field}: {pattern!r:.100} is no pattern: {error}") from None
    return patterns


def _rank(where: str, field: str, value: Any, most: int) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(where, f"{field} must be a whole number from 1 on, got {value!r:.100}")
    if value > most:
        raise _wrong(where, f"{field} {value} is above the largest rank allowed, {most} (max_lora_rank)")
    return value


def _number(where: str, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(where, f"{field} must be a number, got {value!r:.100}")
    return float(value)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where}: {what}", param="lora_path")
