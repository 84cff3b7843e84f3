"""Rotary position embeddings: what a configuration says about them, and the table of cosines and sines.

Configurations spell the same thing in four ways: `rope_theta` with `rope_scaling: {type: …}`, the same with
`rope_type`, the newer `rope_parameters`, which holds `rope_theta` as well, and that nested by layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.models.config_fields import choice, positive_float
from headrace.models.rope_kinds import KINDS, Scaling, Unscaled

__all__ = ["Rope", "cos_sin_table", "read_rope"]

_BESIDE = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
"""Fields that count where the section itself does not have them."""


@dataclass(frozen=True)
class Rope:
    """How positions turn into angles."""

    theta: float
    scaling: Scaling = field(default_factory=Unscaled)
    partial: float = 1.0
    """How much of a head is rotated: its first dimensions."""

    def rotated(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated. Raises `CheckpointError` unless they pair up."""
        dim = int(head_dim * self.partial)
        if dim < 2 or dim % 2 or dim > head_dim:
            raise CheckpointError(
                f"partial_rotary_factor in the model's configuration is {self.partial}, which is {dim} of "
                f"{head_dim} dimensions; the rotated ones pair up and cannot be more than there are"
            )
        return dim

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return radians a token, [R / 2] float32, for requests of up to `length` tokens.

        Raises `CheckpointError` for numbers that do not fit the head size.
        """
        return self.scaling.frequencies(self.theta, self.rotated(head_dim), length)


def read_rope(
    config: Mapping[str, Any], layer_type: str = "full_attention", default_theta: float = 10000.0
) -> Rope:
    """Read the rotary fields of a configuration, for layers of one type where types differ.

    Raises `CheckpointError` naming the field that is wrong.
    """
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = _table(name, config.get(name))
        if any(isinstance(value, Mapping) for value in section.values()):
            section = _table(f"{name}.{layer_type}", section.get(layer_type))
        fields.update(section)
    for name in _BESIDE:
        if fields.get(name) is None:
            fields[name] = config.get(name)
    if config.get("original_max_position_embeddings") is not None:
        # Phi-3 keeps it outside, and it is the truth there.
        fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if fields.get("rope_type") is None:
        fields["rope_type"] = fields.get("type")
    kind = choice(fields, "rope_type", tuple(KINDS), "default")
    return Rope(
        positive_float(fields, "rope_theta", default_theta),
        KINDS[kind](fields),
        positive_float(fields, "partial_rotary_factor", 1.0),
    )


def _table(name: str, section: Any) -> Mapping[str, Any]:
    if section is not None and not isinstance(section, Mapping):
        raise CheckpointError(
            f"{name} in the model's configuration must be a table of fields, got {section!r}"
        )
    return section or {}


def cos_sin_table(
    rope: Rope, head_dim: int, length: int, device: str = "cpu", factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [P, R] float32 for positions [0, P): cosines in the first half of a row, sines in the second.

    R is the number of rotated dimensions of a head, all D as a rule. P is `length`: how long requests may get.
    factors: [R / 2], what the frequencies are divided by, where a checkpoint has that instead of a `rope_scaling`.
    """
    positions = torch.arange(length, dtype=torch.float32)
    frequencies = rope.frequencies(head_dim, length)
    if factors is not None:
        frequencies = frequencies / factors.float().to(frequencies.device)
    angles = positions[:, None] * frequencies[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.scaling.attention_factor
    return table.to(device)
