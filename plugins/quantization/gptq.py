"""`gptq`: checkpoints of GPTQ and its descendants, 4 or 8 bits in groups, with act-order where it was used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Checkpoint, QuantizedWeights
from headrace.core.interfaces.quantization import GroupedWeight
from headrace.plugins.quantization.stated import not_stated, states
from headrace.plugins.quantization.words import asymmetric, scales_of_groups, unpacked_words

__all__ = ["GPTQMethod"]

BITS = (4, 8)


class GPTQMethod:
    """Implements `QuantizationMethod` for `quant_method: gptq`."""

    name = "gptq"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration says gptq."""
        return states(config, self.name)

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why its fields are not known here."""
        if not self.claims(checkpoint.config):
            return [not_stated(self.name)]
        stated, reasons = checkpoint.config["quantization_config"], []
        if stated.get("bits") not in BITS:
            reasons.append(f"bits is {stated.get('bits')!r}; known: {', '.join(map(str, BITS))}")
        if stated.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            reasons.append(f"checkpoint_format is {stated['checkpoint_format']!r}; known: gptq, gptq_v2")
        if stated.get("dynamic"):
            reasons.append("dynamic, which gives layers bits of their own, is not known")
        return reasons

    def begin(self, checkpoint: Checkpoint) -> _Quantizer:
        """Start on a checkpoint."""
        stated = checkpoint.config["quantization_config"]
        plus_one = stated.get("checkpoint_format", "gptq") == "gptq"
        return _Quantizer(int(stated["bits"]), 1 if plus_one else 0)


class _Quantizer:
    """added: what stored zeros have too little: the first format of GPTQ keeps them less 1."""

    def __init__(self, bits: int, added: int) -> None:
        self._bits = bits
        self._added = added

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> GroupedWeight | None:
        """Return the weight of a product; None where it is stored as numbers."""
        if f"{name}.qweight" not in weights:
            return None
        (out, inputs), many = shape, 32 // self._bits
        scales = scales_of_groups(name, out, weights)
        groups = scales.shape[1]
        words = weights.stored(f"{name}.qweight", (inputs // many, out))
        zero_words = weights.stored(f"{name}.qzeros", (groups, out // many))
        codes = unpacked_words(words, self._bits, dim=0).T
        zeros = unpacked_words(zero_words, self._bits, dim=1).T.to(torch.int32) + self._added
        size = -(-inputs // groups)
        order = self._order(name, inputs, groups, size, weights)
        codes = codes if order is None else codes[:, order]
        return asymmetric(codes.contiguous(), self._bits, size, scales, zeros, order)

    def _order(
        self, name: str, inputs: int, groups: int, size: int, weights: QuantizedWeights
    ) -> torch.Tensor | None:
        """Inputs in the order of their groups; None where that is the order they are in."""
        if f"{name}.g_idx" not in weights:
            return None
        index = weights.stored(f"{name}.g_idx", (inputs,)).long()
        order = index.argsort(stable=True)
        expected = torch.arange(inputs) // size
        if not torch.equal(index[order], expected):
            raise CheckpointError(
                f"{name}.g_idx does not put the {inputs} inputs into {groups} groups of {size}, which is what the "
                "scales are for"
            )
        return None if torch.equal(index, expected) else order
