"""Methods that quantize a checkpoint's numbers while it is loaded: `int8`, `w8a8` and `int4`.

Every product is quantized, the output projection included; a tied embedding is looked up in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.interfaces import Checkpoint, QuantizedWeight, QuantizedWeights
from headrace.core.interfaces.quantization import ChannelWeight, GroupedWeight
from headrace.plugins.quantization.layers import named_in
from headrace.plugins.quantization.options import Options
from headrace.plugins.quantization.rounding import by_channel, by_group

__all__ = ["GROUPS", "W8A8", "Int4", "Int8"]

GROUPS = (32, 64, 128)
"""Inputs that may share a scale of `int4`, the first choice first."""


class _Online:
    """What the methods share: they are asked for, and leave out what the options name."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Nothing: it is asked for."""
        return False

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Nothing is in its way."""
        return []

    def left_out(self, name: str) -> bool:
        """Whether the options say that a layer stays as it is."""
        return named_in(name, self._options.ignore, parts=True)


class Int8(_Online):
    """`int8`: 8 bits a weight and a float32 scale for each output; inputs stay as they are."""

    name = "int8"

    def begin(self, checkpoint: Checkpoint) -> Int8:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> QuantizedWeight | None:
        """Return the weight of a product, rounded."""
        return None if self.left_out(name) else _channels(name, shape, weights)


class W8A8(_Online):
    """`w8a8`: 8 bits a weight with a scale for each output, and inputs rounded to 8 bits, each row by its own scale.

    Quicker than `int8` where many rows are computed at once, and less exact.
    """

    name = "w8a8"

    def begin(self, checkpoint: Checkpoint) -> W8A8:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> QuantizedWeight | None:
        """Return the weight of a product, rounded."""
        if self.left_out(name):
            return None
        return ChannelWeight(*by_channel(weights.decoded(f"{name}.weight", shape)))


class Int4(_Online):
    """`int4`: 4 bits a weight and a bfloat16 scale for a group of inputs; the output projection as of `int8`."""

    name = "int4"

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Weights whose inputs make up no whole groups."""
        reasons = []
        for inputs, name in self._inputs(checkpoint).items():
            dividing = [size for size in GROUPS if inputs % size == 0]
            asked = self._options.group_size
            if not dividing or (asked is not None and asked not in dividing):
                fitting = ", ".join(map(str, dividing)) or "none of 32, 64 and 128"
                reasons.append(
                    f"{name} has {inputs} inputs, which groups of {asked or 'any size'} do not divide (group_size of "
                    f"plugins.options.quantization); those that do: {fitting}"
                )
        return reasons

    def begin(self, checkpoint: Checkpoint) -> _Int4Quantizer:
        """Start on a checkpoint."""
        inputs = self._inputs(checkpoint)
        # One size for all, where there is one: checkpoints with several are not read everywhere.
        common = next((size for size in GROUPS if all(one % size == 0 for one in inputs)), None)
        size = self._options.group_size or common
        return _Int4Quantizer(self, size, int(checkpoint.config.get("vocab_size", 0)))

    def _inputs(self, checkpoint: Checkpoint) -> dict[int, str]:
        """Numbers of inputs that products have, each with the name of the first that has it."""
        found: dict[int, str] = {}
        for name, tensor in checkpoint.tensors.items():
            product = ".layers." in name and name.endswith("proj.weight") and len(tensor.shape) == 2
            if product and not self.left_out(name.removesuffix(".weight")):
                found.setdefault(tensor.shape[1], name)
        return found


class _Int4Quantizer:
    """vocab_size: outputs of an output projection, by which it is known."""

    def __init__(self, method: Int4, group_size: int | None, vocab_size: int) -> None:
        self._method = method
        self._group_size = group_size
        self._vocab_size = vocab_size

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> QuantizedWeight | None:
        """Return the weight of a product, rounded; None where groups do not divide its inputs."""
        if self._method.left_out(name):
            return None
        if shape[0] == self._vocab_size:
            return _channels(name, shape, weights)
        size = self._group_size or next((size for size in GROUPS if shape[1] % size == 0), 0)
        if not size or shape[1] % size:
            return None
        codes, scales = by_group(weights.decoded(f"{name}.weight", shape), size)
        return GroupedWeight(codes, 4, 8, size, scales)


def _channels(name: str, shape: tuple[int, int], weights: QuantizedWeights) -> GroupedWeight:
    numbers, scales = by_channel(weights.decoded(f"{name}.weight", shape))
    return GroupedWeight(numbers.view(torch.uint8) ^ 128, 8, 128, shape[1], scales[:, None])
