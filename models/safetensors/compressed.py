"""Quantized weights as checkpoints of the format compressed-tensors hold them: tensors, and words of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from headrace.core.interfaces.quantization import ChannelWeight, GroupedWeight, QuantizedWeight

__all__ = ["compressed_config", "compressed_tensors"]

BY_TOKEN = MappingProxyType(
    {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
)


def compressed_tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return a weight's tensors, by the ends of their names.

    Raises `ValueError` for a form that is not written: minimums, blocks, other zeros than the middle.
    """
    if isinstance(weight, ChannelWeight):
        return {"weight": weight.codes, "weight_scale": weight.scales[:, None]}
    plain = weight.minimums is None and weight.block_scales is None and weight.order is None
    if not plain or weight.bits not in (4, 8) or weight.zero != 2 ** (weight.bits - 1):
        raise ValueError(f"a weight of {weight.bits} bits with zero {weight.zero} is not written as such")
    return {
        "weight_packed": _words(weight.codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [out, in] -> int32 [out, in · bits / 32], lowest bits first."""
    many = 32 // bits
    wide = F.pad(codes, (0, -codes.shape[1] % many)).to(torch.int64).view(codes.shape[0], -1, many)
    words = (wide << (torch.arange(many) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def compressed_config(weights: Mapping[str, QuantizedWeight], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of weights, by the names of their products.

    The form that most have is that of all linear layers; others are named. ignored: layers that stay as they are.
    """
    forms: dict[str, list[str]] = {}
    schemes: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        scheme = _scheme(weight)
        forms.setdefault(repr(scheme), []).append(name)
        schemes[repr(scheme)] = scheme
    most, *others = sorted(forms, key=lambda form: -len(forms[form]))
    groups = {"group_0": {"targets": ["Linear"], **schemes[most]}}
    for number, form in enumerate(others, 1):
        groups[f"group_{number}"] = {"targets": forms[form], **schemes[form]}
    return {
        "quant_method": "compressed-tensors",
        "format": schemes[most]["format"],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _scheme(weight: QuantizedWeight) -> dict[str, Any]:
    """How one weight is held."""
    rounded = isinstance(weight, ChannelWeight)
    bits = 8 if isinstance(weight, ChannelWeight) else weight.bits
    numbers: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    if isinstance(weight, GroupedWeight) and weight.group_size < weight.shape[1]:
        numbers |= {"strategy": "group", "group_size": weight.group_size}
    else:
        numbers |= {"strategy": "channel", "group_size": None}
    return {
        "weights": numbers,
        "input_activations": dict(BY_TOKEN) if rounded else None,
        "output_activations": None,
        "format": "int-quantized" if rounded else "pack-quantized",
    }
