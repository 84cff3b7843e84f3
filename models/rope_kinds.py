"""How a context is stretched beyond what a model was trained for: the kinds of rotary scaling.

A kind reads its own fields, and turns the base `theta` into radians a token for each pair of dimensions. Two kinds
depend on how long requests get, `dynamic` and `longrope`. Here that is the length the model is built for
(`max_model_len`), so that a token's key is the same whatever else is in the batch and however a prompt is cut;
transformers takes the longest position of each call, and then agrees with keys it cached earlier only by chance. The
two give the same for a prompt run whole if its length and `max_model_len` lie on one side of the trained length
(`longrope`), or are both within it or equal (`dynamic`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from headrace.core.errors import CheckpointError
from headrace.models.config_fields import flag, positive_float, positive_floats, positive_int

__all__ = ["KINDS", "Dynamic", "Linear", "Llama3", "LongRope", "Scaling", "Unscaled", "Yarn"]

_MOST_TOKENS = 2**31


class Scaling(Protocol):
    """One kind, with its numbers."""

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        ...

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """Return [dim / 2] float32 for requests of up to `length` tokens."""
        ...

    def reach(self, max_positions: int) -> int:
        """How many tokens it serves where the configuration says `max_position_embeddings`."""
        ...


def _powers(theta: float, dim: int) -> torch.Tensor:
    # float32 throughout, as the models were trained: more digits would be other angles at far positions.
    powers: torch.Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return powers


def _length(fields: Mapping[str, Any]) -> int:
    """Tokens it was trained for before its context was stretched; where that is not said, those it is made for."""
    if fields.get("original_max_position_embeddings") is None and fields.get("max_position_embeddings"):
        return positive_int(fields, "max_position_embeddings")
    return positive_int(fields, "original_max_position_embeddings")


@dataclass(frozen=True)
class Unscaled:
    """Positions as they are."""

    attention_factor: float = 1.0

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Unscaled:
        """Read nothing."""
        return cls()

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`."""
        return 1.0 / _powers(theta, dim)

    def reach(self, max_positions: int) -> int:
        """See `Scaling`."""
        return max_positions


@dataclass(frozen=True)
class Linear(Unscaled):
    """Positions divided by a factor."""

    factor: float = 1.0

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Linear:
        """Read `factor`."""
        return cls(factor=positive_float(fields, "factor"))

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`."""
        return 1.0 / _powers(theta, dim) / self.factor


@dataclass(frozen=True)
class Llama3(Unscaled):
    """Short waves stay, long ones are stretched by the factor, those between go over smoothly."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Llama3:
        """Read the fields, all of which must be there."""
        low = positive_float(fields, "low_freq_factor")
        high = positive_float(fields, "high_freq_factor")
        if high <= low:
            raise CheckpointError(
                f"high_freq_factor ({high}) in the model's configuration must be above low_freq_factor ({low})"
            )
        return cls(
            factor=positive_float(fields, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_length=_length(fields),
        )

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`."""
        plain = 1.0 / _powers(theta, dim)
        wavelength = 2 * math.pi / plain
        blend = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        stretched = plain / self.factor
        between = (1 - blend) * stretched + blend * plain
        return torch.where(blend < 0, stretched, torch.where(blend > 1, plain, between))


@dataclass(frozen=True)
class Dynamic(Unscaled):
    """A larger base where the model is built for more tokens than it was trained for ("NTK-aware")."""

    factor: float = 1.0
    trained_length: int = 2048

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Dynamic:
        """Read `factor`, and `max_position_embeddings`, which is the trained length here."""
        factor = positive_float(fields, "factor")
        if factor < 1:
            raise CheckpointError(
                f"factor in the model's configuration must be at least 1 for the rope_type dynamic, got {factor}"
            )
        return cls(factor=factor, trained_length=positive_int(fields, "max_position_embeddings"))

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`. Raises `CheckpointError` where a single pair turns: a larger base changes nothing then."""
        if dim < 4:
            raise CheckpointError(
                f"rope_type dynamic needs 4 rotated dimensions; head_dim and partial_rotary_factor make {dim}"
            )
        longer = max(length, self.trained_length) / self.trained_length
        base = theta * (self.factor * longer - (self.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / _powers(base, dim)

    def reach(self, max_positions: int) -> int:
        """See `Scaling`."""
        return _stretched(max_positions, self.factor)


@dataclass(frozen=True)
class Yarn(Unscaled):
    """Dimensions that turn often within the trained length stay, slow ones are stretched, a ramp lies between."""

    factor: float = 1.0
    original_length: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Yarn:
        """Read `factor` and what may be given besides; the attention factor follows from it where it is not."""
        original = _length(fields)
        factor = _factor(fields, original)
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        if fields.get("mscale") and fields.get("mscale_all_dim") and factor > 1:
            over, under = (
                0.1 * positive_float(fields, name) * math.log(factor) + 1.0
                for name in ("mscale", "mscale_all_dim")
            )
            attention = over / under
        return cls(
            attention_factor=positive_float(fields, "attention_factor", attention),
            factor=factor,
            original_length=original,
            beta_fast=positive_float(fields, "beta_fast", 32.0),
            beta_slow=positive_float(fields, "beta_slow", 1.0),
            truncate=flag(fields, "truncate", True),
        )

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`. Raises `CheckpointError` for a base at which no dimension turns slower than another."""
        if theta <= 1:
            raise CheckpointError(
                f"rope_theta in the model's configuration must be above 1 for the rope_type yarn, got {theta}"
            )
        powers = _powers(theta, dim)
        begin, end = (
            # The dimension whose wave turns this often within the trained length.
            dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        span = end - begin if end != begin else 0.001
        kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - begin) / span).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def reach(self, max_positions: int) -> int:
        """See `Scaling`: files say either the length before or that after the stretching."""
        return max(max_positions, _stretched(self.original_length, self.factor))


@dataclass(frozen=True)
class LongRope(Unscaled):
    """Searched divisors for each pair of dimensions: one set up to the trained length, another beyond it."""

    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    original_length: int = 4096

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> LongRope:
        """Read both sets; the attention factor follows from how far the context is stretched, if not given."""
        original = _length(fields)
        factor = _factor(fields, original)
        attention = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        )
        return cls(
            attention_factor=positive_float(fields, "attention_factor", attention),
            short_factor=positive_floats(fields, "short_factor"),
            long_factor=positive_floats(fields, "long_factor"),
            original_length=original,
        )

    def frequencies(self, theta: float, dim: int, length: int) -> torch.Tensor:
        """See `Scaling`. Raises `CheckpointError` where there are not dim / 2 divisors."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != dim // 2:
                raise CheckpointError(
                    f"{name} in the model's configuration must have {dim // 2} numbers, one for each pair of the "
                    f"{dim} rotated dimensions; it has {count}"
                )
        divisors = self.long_factor if length > self.original_length else self.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(theta, dim))


def _factor(fields: Mapping[str, Any], original: int) -> float:
    """Return how far the context is stretched: `factor`, or by the lengths before and after."""
    if fields.get("factor") is None:
        return positive_int(fields, "max_position_embeddings") / original
    return positive_float(fields, "factor")


def _stretched(length: int, factor: float) -> int:
    """Return how many tokens it is after stretching. Raises `CheckpointError` for more than any model can have."""
    if length * factor > _MOST_TOKENS:
        raise CheckpointError(
            f"factor in the model's configuration is {factor}, which makes {length} tokens more than {_MOST_TOKENS}"
        )
    return int(length * factor)


KINDS: Mapping[str, Callable[[Mapping[str, Any]], Scaling]] = MappingProxyType(
    {
        "default": Unscaled.read,
        "linear": Linear.read,
        "dynamic": Dynamic.read,
        "llama3": Llama3.read,
        "yarn": Yarn.read,
        "longrope": LongRope.read,
        "su": LongRope.read,  # what the first Phi-3 files call it
    }
)
"""Readers by `rope_type`. Fields are those of the section, with `max_position_embeddings` beside them."""
