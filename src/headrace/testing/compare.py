"""How results are compared: within a tolerance by dtype, or bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ROWS", "TOLERANCES", "check_close", "check_equal", "torch_threads"]

TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""By dtype: |got - right| ≤ tolerance · (1 + |right|), element by element."""

ROWS = (1, 2, 3, 15, 16, 17, 33, 64, 257)
"""Batch sizes of the row-invariance proofs: around the sizes at which kernels like to change their path."""


def check_close(got: torch.Tensor, right: torch.Tensor, tolerance: float, what: str) -> None:
    """Raise `AssertionError` unless |got - right| ≤ tolerance · (1 + |right|) everywhere, NaN nowhere."""
    if got.shape != right.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, right is {tuple(right.shape)}")
    excess = (got.double() - right).abs() - tolerance * (1 + right.abs())
    if torch.isnan(excess).any():
        first = torch.isnan(excess).nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: NaN at {first}: an unused slot was read, or the value was never written"
        )
    if (excess > 0).any():
        worst = divmod(int(excess.argmax()), max(1, excess[0].numel()))[0]
        difference = float((got.double() - right).abs().max())
        raise AssertionError(
            f"{what}: differs by {difference:.3g} (row {worst}); the tolerance is {tolerance}"
        )


def check_equal(got: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """Raise `AssertionError` unless both are equal bit by bit and free of NaN."""
    if got.shape != right.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, right is {tuple(right.shape)}")
    if torch.isnan(right).any() or torch.isnan(got).any():
        raise AssertionError(f"{what}: NaN")
    if not torch.equal(got, right):
        differing = int((got != right).sum())
        raise AssertionError(f"{what}: {differing} of {got.numel()} values differ in their bits")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with so many threads, and put back the number there was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
