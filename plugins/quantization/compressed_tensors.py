"""`compressed-tensors`: checkpoints of llm-compressor and of `headrace quantize`.

Weights of 4 or 8 bits packed into words, or whole numbers and floats of 8 bits; inputs as they are, or rounded to 8
bits row by row. What is quantized is told by the tensors that are there; the configuration says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Checkpoint, QuantizedWeight, QuantizedWeights
from headrace.core.interfaces.quantization import ChannelWeight
from headrace.plugins.quantization.fp8 import scaled
from headrace.plugins.quantization.layers import named_in
from headrace.plugins.quantization.stated import not_stated, states
from headrace.plugins.quantization.words import asymmetric, unpacked_words

__all__ = ["CompressedTensorsMethod"]

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
BITS = (4, 8)
LINEAR = "Linear"


class CompressedTensorsMethod:
    """Implements `QuantizationMethod` for `quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration says compressed-tensors."""
        return states(config, self.name)

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why its schemes are not known here."""
        if not self.claims(checkpoint.config):
            return [not_stated(self.name)]
        stated = checkpoint.config["quantization_config"]
        groups = stated.get("config_groups")
        if not isinstance(groups, Mapping) or not all(
            isinstance(group, Mapping) for group in groups.values()
        ):
            return [f"config_groups is {groups!r:.100}; it must map names to schemes"]
        reasons = []
        if stated.get("format") not in FORMATS:
            reasons.append(f"format is {stated.get('format')!r}; known: {', '.join(FORMATS)}")
        sparsity = (stated.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            reasons.append(f"sparsity_config.format is {sparsity!r}; known: dense")
        for label, group in groups.items():
            reasons += [f"config_groups.{label}: {reason}" for reason in _unknown(group)]
        return reasons

    def begin(self, checkpoint: Checkpoint) -> _Quantizer:
        """Start on a checkpoint."""
        stated = checkpoint.config["quantization_config"]
        return _Quantizer(list(stated["config_groups"].values()), tuple(stated.get("ignore") or ()))


def _unknown(group: Mapping[str, Any]) -> list[str]:
    """Say what a scheme asks for that is not known."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    reasons = []
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        reasons.append(f"weights are {kind} of {bits} bits; known: int of 4 or 8, float of 8")
    if weights.get("strategy") not in ("tensor", "channel", "group", "block"):
        reasons.append(
            f"weights.strategy is {weights.get('strategy')!r}; known: tensor, channel, group, block"
        )
    if inputs and kind == "int":
        stated = (inputs.get("type", "int"), inputs.get("num_bits"), inputs.get("strategy"))
        if stated != ("int", 8, "token") or not inputs.get("dynamic") or not inputs.get("symmetric", True):
            reasons.append(
                f"input_activations are {stated[0]} of {stated[1]} bits by {stated[2]}; known: int of 8 bits by "
                "token, dynamic and symmetric"
            )
        elif (
            bits != 8
            or weights.get("strategy") not in ("channel", "tensor")
            or not weights.get("symmetric", True)
        ):
            reasons.append(
                "input_activations are rounded; weights must then be of 8 bits by channel, symmetric"
            )
    return reasons


class _Quantizer:
    """One checkpoint's schemes at work."""

    def __init__(self, groups: list[Mapping[str, Any]], ignored: tuple[str, ...]) -> None:
        self._groups = groups
        self._ignored = ignored

    def weight(
        self, name: str, shape: tuple[int, int], weights: QuantizedWeights
    ) -> QuantizedWeight | torch.Tensor | None:
        """Return the weight of a product; None where it is stored as numbers."""
        if f"{name}.weight_packed" not in weights and f"{name}.weight_scale" not in weights:
            return None
        if named_in(name, self._ignored):
            raise CheckpointError(f"{name} is among the layers to ignore, and has quantized tensors")
        scheme = self._scheme(name)
        stated = scheme["weights"]
        scales = weights.stored(f"{name}.weight_scale")
        if f"{name}.input_scale" in weights:
            # Of floats: inputs are not rounded here.
            weights.stored(f"{name}.input_scale")
        if stated.get("type", "int") == "float":
            block = tuple(stated.get("block_structure") or (1, 1))
            return scaled(weights.stored(f"{name}.weight", shape), scales, block, f"{name}.weight_scale")
        if f"{name}.weight_packed" in weights:
            return _packed(name, shape, int(stated["num_bits"]), scales, weights)
        codes = weights.stored(f"{name}.weight", shape)
        if scheme.get("input_activations"):
            return ChannelWeight(codes, scales.float().flatten().expand(shape[0]).contiguous())
        return _grouped(name, codes.view(torch.uint8) ^ 128, 8, scales, weights)

    def _scheme(self, name: str) -> Mapping[str, Any]:
        """Return the scheme whose targets name a layer; those that name all are the last to be asked."""
        for group in self._groups:
            if named_in(name, [target for target in group.get("targets", ()) if target != LINEAR]):
                return group
        for group in self._groups:
            if LINEAR in group.get("targets", ()):
                return group
        raise CheckpointError(f"{name} has quantized tensors, and is no target of any of config_groups")


def _packed(
    name: str, shape: tuple[int, int], bits: int, scales: torch.Tensor, weights: QuantizedWeights
) -> QuantizedWeight:
    """Take a weight out of words, inputs side by side."""
    out, inputs = shape
    words = weights.stored(f"{name}.weight_packed", (out, -(-inputs * bits // 32)))
    if f"{name}.weight_shape" in weights:
        stated = weights.stored(f"{name}.weight_shape").tolist()
        if stated != list(shape):
            raise CheckpointError(
                f"{name}.weight_shape is {stated}; the model's configuration asks for {list(shape)}"
            )
    return _grouped(name, unpacked_words(words, bits, dim=1)[:, :inputs].contiguous(), bits, scales, weights)


def _grouped(
    name: str, codes: torch.Tensor, bits: int, scales: torch.Tensor, weights: QuantizedWeights
) -> QuantizedWeight:
    """Codes with scales for groups: for the whole, for outputs or for a few inputs."""
    out, inputs = codes.shape
    if scales.numel() != 1 and (scales.numel() % out or scales.shape[0] != out):
        raise CheckpointError(
            f"{name}.weight_scale has the shape {list(scales.shape)}; it must have {out} rows"
        )
    wide = scales.reshape(1, 1).expand(out, 1) if scales.numel() == 1 else scales.reshape(out, -1)
    size = -(-inputs // wide.shape[1])
    middle = 2 ** (bits - 1)
    zeros = torch.full(wide.shape, middle, dtype=torch.int32)
    if f"{name}.weight_zero_point" in weights:
        zeros = middle + _zeros(name, bits, wide, weights)
    order = None
    if f"{name}.weight_g_idx" in weights:
        index = weights.stored(f"{name}.weight_g_idx", (inputs,)).long()
        order = index.argsort(stable=True)
        if not torch.equal(index[order], torch.arange(inputs) // size):
            raise CheckpointError(f"{name}.weight_g_idx does not put {inputs} inputs into groups of {size}")
        codes = codes[:, order].contiguous()
    return asymmetric(codes, bits, size, wide, zeros, order)


def _zeros(name: str, bits: int, scales: torch.Tensor, weights: QuantizedWeights) -> torch.Tensor:
    """Zeros as they are counted from the middle, [out, groups]."""
    out, groups = scales.shape
    stored = weights.stored(f"{name}.weight_zero_point")
    if weights.encoding(f"{name}.weight_zero_point") == "I32" and stored.shape == (
        -(-out * bits // 32),
        groups,
    ):
        # Packed along outputs, and counted from the least.
        counted: torch.Tensor = unpacked_words(stored, bits, dim=0)[:out].to(torch.int32) - 2 ** (bits - 1)
        return counted
    if stored.numel() not in (1, out * groups):
        raise CheckpointError(
            f"{name}.weight_zero_point has the shape {list(stored.shape)}; scales are {list(scales.shape)}"
        )
    return (
        stored.to(torch.int32).expand(scales.shape)
        if stored.numel() == 1
        else stored.to(torch.int32).view(out, -1)
    )
