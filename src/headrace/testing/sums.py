"""Products whose sums can be had, proved: sums lie where segments say, and finishing them gives the product."""

from __future__ import annotations

import torch

from headrace.core.interfaces import SummedProduct
from headrace.core.interfaces.wrapping import BLOCK
from headrace.testing.compare import check_close, check_equal

__all__ = ["check_sums"]


def check_sums(
    product: SummedProduct, x: torch.Tensor, right: torch.Tensor, tolerance: float, what: str
) -> None:
    """Compare sums of x [N, in] with `right` [N, outputs], and the finished ones with the product, bit by bit."""
    sums = product.sums(x)
    for segment in product.segments:
        index = torch.arange(segment.end - segment.start)
        columns = segment.first + index // BLOCK * segment.step + index % BLOCK
        check_close(sums[:, columns], right[:, segment.start : segment.end], tolerance, f"sums, {what}")
    check_equal(product.finish(sums, x.dtype), product(x), f"{what}: finish(sums(x), x.dtype)")
