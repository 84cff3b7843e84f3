"""From a checkpoint to a quantized one in a folder: what `headrace quantize` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.backends.torch_reference.grouped import decoded
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.interfaces import (
    ChannelWeight,
    Checkpoint,
    GroupedWeight,
    QuantizationMethod,
    QuantizedWeight,
)
from headrace.models.quantized import stated_method
from headrace.models.safetensors.compressed import compressed_config, compressed_tensors
from headrace.models.safetensors.writer import write_tensors
from headrace.models.weights import CheckpointWeights

__all__ = ["LayerError", "Quantized", "products", "quantize_checkpoint"]

WEIGHTS = "model.safetensors"
COPIED = (".json", ".jinja", ".txt", ".model")
"""Ends of the names of files that go along with the weights."""


@dataclass(frozen=True)
class LayerError:
    """What a product's weight lost."""

    name: str
    shape: tuple[int, int]
    bits: float
    """A number, scales included."""
    error: float
    """Length of the difference to the original, as a share of the original's."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint that was written."""

    layers: list[LayerError]
    bytes_before: int
    """Of the numbers in the type they were computed in."""
    bytes_after: int


def products(checkpoint: Checkpoint) -> list[str]:
    """Names of the weights that are quantized: those of the products inside of layers, without `.weight`."""
    return [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if ".layers." in name and name.endswith(".weight") and len(tensor.shape) == 2
    ]


def quantize_checkpoint(
    checkpoint: Checkpoint, method: QuantizationMethod, folder: Path, tick: Callable[[], None] = lambda: None
) -> Quantized:
    """Quantize the products of a checkpoint and write all into a folder, in the format compressed-tensors.

    Embeddings and the output projection stay as they are. tick: called after each product.
    Raises `ConfigError` where the method cannot do it, `CheckpointError` for damaged tensors, `OSError`.
    """
    if (reasons := method.why_not(checkpoint)) or stated_method(checkpoint.config) is not None:
        told = "; ".join(reasons) or "its weights are quantized already"
        raise ConfigError(f"{checkpoint.path} cannot be quantized by {method.name!r}: {told}")
    dtype = _dtype(checkpoint)
    weights = CheckpointWeights(checkpoint, getattr(torch, dtype))
    written: dict[str, torch.Tensor] = {}
    kept: dict[str, QuantizedWeight] = {}
    layers, ignored = [], ["lm_head"]
    for name, weight in _quantized(checkpoint, method, weights):
        tick()
        if weight is None:
            ignored.append(name)
            continue
        kept[name] = _light(weight)
        written |= {f"{name}.{end}": tensor for end, tensor in compressed_tensors(weight).items()}
        layers.append(_judged(name, weight, weights))
    if not kept:
        raise ConfigError(f"{checkpoint.path} has no layers that {method.name!r} quantizes")
    done = {layer.name for layer in layers}
    for name, tensor in checkpoint.tensors.items():
        if name.removesuffix(".weight") not in done:
            written[name] = weights.take(name, tuple(tensor.shape))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, written)
    _write_beside(checkpoint, folder, dtype, compressed_config(kept, ignored))
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in checkpoint.tensors.values())
    return Quantized(layers, 2 * numbers, (folder / WEIGHTS).stat().st_size)


def _quantized(
    checkpoint: Checkpoint, method: QuantizationMethod, weights: CheckpointWeights
) -> Iterator[tuple[str, QuantizedWeight | None]]:
    quantizer = method.begin(checkpoint)
    for name in products(checkpoint):
        out, inputs = checkpoint.tensors[f"{name}.weight"].shape
        weight = quantizer.weight(name, (out, inputs), weights)
        if isinstance(weight, torch.Tensor):
            raise CheckpointError(f"{name}: {method.name!r} gives plain numbers, which are not written")
        yield name, weight


def _light(weight: QuantizedWeight) -> QuantizedWeight:
    """One output of a weight: of its form, which the configuration is written from."""
    if isinstance(weight, ChannelWeight):
        return ChannelWeight(weight.codes[:1], weight.scales[:1])
    return GroupedWeight(weight.codes[:1], weight.bits, weight.zero, weight.group_size, weight.scales[:1])


def _judged(name: str, weight: QuantizedWeight, weights: CheckpointWeights) -> LayerError:
    right = weights.decoded(f"{name}.weight", weight.shape)
    if isinstance(weight, ChannelWeight):
        got = weight.codes.float() * weight.scales[:, None]
    else:
        got = decoded(weight)
    length = float(right.norm())
    error = float((got - right).norm()) / length if length else 0.0
    return LayerError(name, weight.shape, 8 * weight.nbytes / right.numel(), error)


def _dtype(checkpoint: Checkpoint) -> str:
    """The type that stays with what is not quantized: the checkpoint's own; bfloat16 where that is packed."""
    stated = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
    return stated if stated in ("float32", "float16", "bfloat16") else "bfloat16"


def _write_beside(checkpoint: Checkpoint, folder: Path, dtype: str, quantization: Mapping[str, Any]) -> None:
    """Write the configuration, and copy what else lies in a Hugging Face folder."""
    if checkpoint.path.is_dir():
        for file in sorted(checkpoint.path.iterdir()):
            if file.suffix in COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    config |= {"dtype": dtype, "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
