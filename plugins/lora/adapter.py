"""An adapter in memory: its matrices in the order kernels read them, and a line that tells where they lie."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from headrace.backends.cpu.arena import Arena
from headrace.core.errors import RequestError, nearest
from headrace.core.interfaces.wrapping import BLOCK
from headrace.plugins.lora.config import PeftConfig, read_config
from headrace.plugins.lora.files import AdapterFiles
from headrace.plugins.lora.modules import Target, Targets

__all__ = ["COLUMNS", "RANKS", "Adapter", "Packed", "pack_adapter", "unpacked_a", "unpacked_b"]

RANKS = 16
"""Rows of A lie together in panels of so many."""
COLUMNS = 2 * BLOCK
"""And so many outputs of B."""

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(?:\.default)?(?:\.weight)?"
)

_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.base_layer\.weight")
"""PEFT saves the base model's own weight beside an adapter of an embedding or an output projection."""


@dataclass
class Packed:
    """What an adapter adds to one product; an entry each of its names, and each of its pieces."""

    ranks: list[int]
    """0: nothing."""
    a: list[torch.Tensor | None]
    """[ranks / `RANKS`, in / P, `RANKS`, P]; P is 2 in bfloat16 and 1 in float32. Of an embedding [V, rank]."""
    b: list[torch.Tensor | None]
    """[size / `COLUMNS`, rank, `COLUMNS`], already multiplied by alpha / rank."""


@dataclass(frozen=True)
class Adapter:
    """One version of an adapter, ready to run."""

    digest: str
    products: Mapping[int, Packed]
    """By `Product.index`, of those it adds to."""
    line: npt.NDArray[np.int64]
    """int64: what a slot's line is while it holds this adapter."""
    nbytes: int


@dataclass
class _Pair:
    """The two matrices of one module."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    is_embedding: bool = False


def pack_adapter(files: AdapterFiles, targets: Targets, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Check an adapter against the model and put it in order. Raises `RequestError` naming what is wrong."""
    where = str(files.path)
    config = read_config(files.config, where, max_rank)
    products: dict[int, Packed] = {}
    for module, pair in _pairs(files, targets).items():
        target = targets.get(module)
        assert target is not None
        product = target.product
        packed = products.setdefault(
            product.index,
            Packed([0] * len(product.names), [None] * len(product.names), [None] * len(product.pieces)),
        )
        a, b = _checked(where, module, pair, target, config, max_rank)
        _fill(packed, target, a, b.float() * config.factor_of(module), dtype)
    line = np.zeros(targets.line, dtype=np.int64)
    nbytes = _put_together(list(products.values()))
    for index, packed in products.items():
        product = targets.products[index]
        line[product.offset : product.offset + product.width] = _entries(packed)
    return Adapter(files.digest, products, line, nbytes)


def _put_together(products: Sequence[Packed]) -> int:
    """Move matrices into large pages, in the order they are read; return their bytes.

    Every step reads those of all its adapters, once.
    """
    places = [(half, i) for packed in products for half in (packed.a, packed.b) for i in range(len(half))]
    tensors = [(half, i, tensor) for half, i in places if (tensor := half[i]) is not None]
    arena = Arena(sum(Arena.bytes_for(tensor.shape, tensor.dtype) for _, _, tensor in tensors))
    for half, i, tensor in tensors:
        half[i] = arena.empty(tensor.shape, tensor.dtype).copy_(tensor)
    return sum(tensor.nbytes for _, _, tensor in tensors)


def _pairs(files: AdapterFiles, targets: Targets) -> dict[str, _Pair]:
    """Sort an adapter's tensors by module."""
    pairs: dict[str, _Pair] = {}
    for name, tensor in files.tensors.items():
        match = _KEY.fullmatch(name)
        if match is None and _is_copy(files, targets, name, tensor):
            continue
        if match is None:
            raise _wrong(
                files.path, f"tensor {name!r:.200} is no matrix of LoRA (…lora_A.weight, …lora_B.weight)"
            )
        module = match["module"]
        if targets.get(module) is None:
            known = targets.names
            raise _wrong(
                files.path,
                f"it adapts the module {module!r:.200}, which this model does not have{nearest(module, known)}; "
                f"there are {len(known)}, such as {', '.join(known[:3])}",
            )
        pair = pairs.setdefault(module, _Pair(is_embedding=bool(match["embedding"])))
        setattr(pair, match["half"].lower(), tensor)
    if not pairs:
        raise _wrong(files.path, "it adapts no module of the model: its weights hold no tensor")
    return pairs


def _is_copy(files: AdapterFiles, targets: Targets, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the base model's own. Raises `RequestError` for one of another vocabulary."""
    match = _COPY.fullmatch(name)
    target = None if match is None else targets.get(match["module"])
    if target is None:
        return False
    inputs, outputs = target.shapes
    shape = (inputs, outputs) if target.product.is_embedding else (outputs, inputs)
    if tuple(tensor.shape) != shape:
        raise _wrong(
            files.path,
            f"it was trained beside a {name} of shape {list(tensor.shape)}, and this model's has {list(shape)}: a "
            "vocabulary that was enlarged needs its own base model",
        )
    return True


def _checked(
    where: str, module: str, pair: _Pair, target: Target, config: PeftConfig, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [rank, in] and B [out, rank]."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        missing = "A" if a is None else "B"
        raise _wrong(where, f"module {module!r} has no lora_{missing}: each needs both matrices")
    if pair.is_embedding != target.product.is_embedding:
        kind = "lookup" if target.product.is_embedding else "product"
        raise _wrong(where, f"module {module!r} is a {kind} in this model, and the adapter's is not")
    rank, (inputs, outputs) = config.rank_of(module), target.shapes
    held = a.shape[0] if a.ndim == 2 else 0
    if held > max_rank:
        raise _wrong(
            where, f"module {module!r} has rank {held}; the largest allowed is {max_rank} (max_lora_rank)"
        )
    for half, tensor, shape in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if tuple(tensor.shape) != shape:
            raise _wrong(
                where,
                f"lora_{half} of module {module!r} has the shape {list(tensor.shape)}; this model and rank {rank} "
                f"(adapter_config.json) ask for {list(shape)}",
            )
        if not torch.isfinite(tensor).all():
            raise _wrong(
                where, f"lora_{half} of module {module!r} holds numbers that are none (NaN or infinite)"
            )
    return a, b


def _fill(packed: Packed, target: Target, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    product, place = target.product, target.place
    rank = a.shape[0]
    packed.ranks[place] = rank
    if product.is_embedding:
        packed.a[place] = a.t().to(dtype).contiguous()
    else:
        packed.a[place] = _panels(a.to(dtype))
    for index, piece in enumerate(product.pieces):
        if piece.name == place:
            size = piece.end - piece.start
            part = F.pad(b[piece.start : piece.end].to(dtype), (0, 0, 0, -size % COLUMNS))
            packed.b[index] = part.unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()


def _pair(dtype: torch.dtype) -> int:
    """Return how many inputs lie together in a panel of A: as many as one instruction takes."""
    return 2 if dtype == torch.bfloat16 else 1


def _panels(a: torch.Tensor) -> torch.Tensor:
    together = _pair(a.dtype)
    padded = F.pad(a, (0, -a.shape[1] % together, 0, -a.shape[0] % RANKS))
    return padded.view(padded.shape[0] // RANKS, RANKS, -1, together).transpose(1, 2).contiguous()


def unpacked_a(a: torch.Tensor, rank: int, inputs: int) -> torch.Tensor:
    """Return A [rank, in] from its panels."""
    return a.transpose(1, 2).reshape(a.shape[0] * RANKS, -1)[:rank, :inputs]


def unpacked_b(b: torch.Tensor, size: int) -> torch.Tensor:
    """Return B [rank, size] of a piece from its blocks."""
    return b.transpose(0, 1).flatten(1)[:, :size]


def _entries(packed: Packed) -> Sequence[int]:
    """Return a product's part of a slot's line."""
    entries: list[int] = []
    for rank, a in zip(packed.ranks, packed.a, strict=True):
        entries += [0 if a is None else a.data_ptr(), rank]
    return [*entries, *(0 if b is None else b.data_ptr() for b in packed.b)]


def _wrong(where: str | Path, what: str) -> RequestError:
    return RequestError(f"the adapter {where} cannot be used: {what}", param="lora_path")
