"""Draws and log-probabilities of rows of logits, by native kernels."""

from __future__ import annotations

import torch

from headrace.backends.cpu.library import Kernels

__all__ = ["RowSampling"]


class RowSampling:
    """The ops `draw` and `score` of `headrace.core.interfaces.ops`; a row is one thread's."""

    def __init__(self, kernels: Kernels) -> None:
        self._draw = kernels.by_name("draw")
        self._score = kernels.by_name("score")

    def draw(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        keys: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        log_min_p: torch.Tensor,
    ) -> torch.Tensor:
        """Return an id for each row, -1 where roundings would decide; see `sampling.cpp`."""
        rows, size = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        given = (best, keys, temperature, top_k, top_p, log_min_p)
        self._draw(logits.data_ptr(), rows, size, *(one.data_ptr() for one in given), ids.data_ptr())
        return ids

    def score(
        self, logits: torch.Tensor, ids: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return totals, ranks and the likeliest ids of each row."""
        rows, size = logits.shape
        totals = torch.empty(rows, dtype=torch.float64)
        ranks = torch.empty(rows, dtype=torch.int64)
        likeliest = torch.empty(rows, k, dtype=torch.int64)
        results = (totals, ranks, likeliest)
        self._score(logits.data_ptr(), rows, size, ids.data_ptr(), k, *(one.data_ptr() for one in results))
        return results
