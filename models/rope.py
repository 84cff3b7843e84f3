"""Rotary position embeddings: what a configuration says about them, and the table of cosines and sines.

Configurations spell the same thing in three ways: `rope_theta` with `rope_scaling: {type: …}`, the same with
`rope_type`, and the newer `rope_parameters`, which holds `rope_theta` as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.models.config_fields import choice, positive_float, positive_int

__all__ = ["ROPE_KINDS", "Rope", "cos_sin_table", "read_rope"]

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """How positions turn into angles."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    """`linear`, `llama3`: how much longer than trained for."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_length: int = 0
    """`llama3`: tokens the model was trained for before its context was stretched."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary fields of a configuration. Raises `CheckpointError` naming the field that is wrong."""
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(
                f"{name} in the model's configuration must be a table of fields, got {section!r}"
            )
        fields.update(section or {})
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        if fields.get(name) is None and config.get(name) is not None:
            fields[name] = config[name]
    if fields.get("rope_type") is None:
        fields["rope_type"] = fields.get("type")

    if positive_float(fields, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor in the model's configuration is {fields['partial_rotary_factor']!r}; "
            "only 1.0, every dimension rotated, is supported"
        )
    theta = positive_float(fields, "rope_theta", 10000.0)
    kind = choice(fields, "rope_type", ROPE_KINDS, "default")
    if kind == "default":
        return Rope(theta)
    factor = positive_float(fields, "factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low = positive_float(fields, "low_freq_factor")
    high = positive_float(fields, "high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"high_freq_factor ({high}) in the model's configuration must be above low_freq_factor ({low})"
        )
    return Rope(theta, kind, factor, low, high, positive_int(fields, "original_max_position_embeddings"))


def _frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[D / 2] float32: radians a token, for each pair of dimensions."""
    # float32 throughout, as the models were trained: more digits would be other angles at far positions.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Short waves stay, long ones are stretched by the factor, those between go over smoothly.
        wavelength = 2 * math.pi / frequencies
        blend = (rope.original_length / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        stretched = frequencies / rope.factor
        between = (1 - blend) * stretched + blend * frequencies
        return torch.where(blend < 0, stretched, torch.where(blend > 1, frequencies, between))
    return frequencies


def cos_sin_table(
    rope: Rope, head_dim: int, length: int, device: str = "cpu", factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [P, D] float32 for positions [0, P): cosines in the first half of a row, sines in the second.

    factors: [D / 2], what the frequencies are divided by, where a checkpoint has that instead of a `rope_scaling`.
    """
    positions = torch.arange(length, dtype=torch.float32)
    frequencies = _frequencies(rope, head_dim)
    if factors is not None:
        frequencies = frequencies / factors.float()
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
