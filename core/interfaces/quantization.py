"""The quantization contract: who says how a product's weights are held, and in what form they reach an op set.

A method is asked for by name (`quantization`), or claims a checkpoint by the `quantization_config` in its
configuration. It is then asked for every weight of a product by the checkpoint's own names: parts that a model stacks
(`q_proj`, `k_proj`, `v_proj`) are looked up one by one, whatever they are stacked to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces.checkpoint import Checkpoint

__all__ = [
    "ChannelWeight",
    "GroupedWeight",
    "QuantizationMethod",
    "QuantizedWeight",
    "QuantizedWeights",
    "WeightQuantizer",
]


@dataclass(frozen=True)
class GroupedWeight:
    """Codes of few bits, with scales for groups of inputs; for the linear format `grouped`.

    A number is `(code - zero) * scale + minimum` in float32, rounded after each step. `scale` is `scales[o, g]`, or
    with block scales `block_scales[o, b] * scales[o, g]`; `minimum` is `minimums[o, g]`, or
    `-(block_minimums[o, b] * minimums[o, g])`; a block holds as many groups as make up the inputs.
    """

    codes: torch.Tensor
    """[out, in] uint8, each below 2 ** bits."""
    bits: int
    """4, 5, 6 or 8."""
    zero: int
    """The code that stands for 0."""
    group_size: int
    """Inputs that share a scale: a multiple of 16, or all of them."""
    scales: torch.Tensor
    """[out, groups] float16, bfloat16 or float32; with block scales uint8 (where there are minimums) or int8."""
    minimums: torch.Tensor | None = None
    """[out, groups], of the type of `scales`."""
    block_scales: torch.Tensor | None = None
    """[out, blocks] float16."""
    block_minimums: torch.Tensor | None = None
    """[out, blocks] float16; there where `block_scales` and `minimums` are."""
    order: torch.Tensor | None = None
    """[in] int64: column i of `codes` multiplies input `order[i]`; None: input i."""

    format: ClassVar[str] = "grouped"

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, inputs = self.codes.shape
        return out, inputs

    @property
    def nbytes(self) -> int:
        """Memory it takes once it is packed."""
        scales = (self.scales, self.minimums, self.block_scales, self.block_minimums)
        return self.codes.numel() * self.bits // 8 + sum(0 if one is None else one.nbytes for one in scales)


@dataclass(frozen=True)
class ChannelWeight:
    """Whole numbers with a scale for each output, for inputs that are rounded to 8 bits too: linear format `w8a8`.

    A row of inputs is divided by its largest magnitude / 127 and rounded to whole numbers; the product of whole
    numbers is exact, and is multiplied by both scales.
    """

    codes: torch.Tensor
    """[out, in] int8."""
    scales: torch.Tensor
    """[out] float32."""

    format: ClassVar[str] = "w8a8"

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, inputs = self.codes.shape
        return out, inputs

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.codes.nbytes + self.scales.nbytes


QuantizedWeight = GroupedWeight | ChannelWeight
"""What a linear format other than `dense` is given."""


class QuantizedWeights(Protocol):
    """A checkpoint's tensors as a quantizer takes them: in the types they are stored in."""

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        ...

    def encoding(self, name: str) -> str:
        """How a tensor is stored: `"F32"`, `"Q4_1"`, …; empty where it is not there."""
        ...

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor in the type it is stored in. Raises `CheckpointError` if missing or of another shape."""
        ...

    def encoded(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [rows, bytes a row]. Raises as `stored`."""
        ...

    def decoded(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as float32. Raises as `stored`."""
        ...


class WeightQuantizer(Protocol):
    """A method at work on one checkpoint."""

    def weight(
        self, name: str, shape: tuple[int, int], weights: QuantizedWeights
    ) -> QuantizedWeight | torch.Tensor | None:
        """Return the weight [out, in] of the product `name`; None: it is not quantized.

        A tensor is a weight that was decoded, to be held as numbers of the type to compute in.
        name: without `.weight`. Raises `CheckpointError` where tensors are missing or of other shapes.
        """
        ...


@runtime_checkable
class QuantizationMethod(Protocol):
    """A way of holding weights, as registered."""

    name: str

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's configuration says that its weights are quantized by this method."""
        ...

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why it cannot be used on this checkpoint, in words for a user; empty: it can.

        Asked before any weight is read; of what it claims, reasons are fields of the configuration.
        """
        ...

    def begin(self, checkpoint: Checkpoint) -> WeightQuantizer:
        """Start on a checkpoint for which `why_not` gave no reasons."""
        ...
