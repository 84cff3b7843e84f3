"""The floor of a workload on this machine: what reading weights and KV cache and doing the arithmetic must cost.

    python benchmarks/floor.py [WORKLOAD.json] [--output FLOOR.json] [--weight-bytes N]

No engine that reads all its weights once a step is faster than this:

    seconds = (steps * weight bytes + KV bytes) / read rate + prompt arithmetic / matrix rate

Decoding is bound by reading: the weights once a step, and in each step the keys and values of every running request.
Prompts are bound by arithmetic. All requests run together, so there are as many steps as the longest output has
tokens. The rates are measured here and now, with torch's threads. `plain` is read from pages of 4 KiB, as the usual
allocators give; `huge` from pages of 2 MiB, which read faster where the machine has them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).parent / "workloads" / "mixed48.json"
HUGE_PAGE = 2 << 20
MATRIX = 2048
"""Rows and columns of the matrices that are multiplied."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides its floor."""

    layers: int
    kv_heads: int
    head_size: int
    linear_parameters: int
    """Weights of the products that every token of a prompt goes through: all but the last one, to logits."""
    weight_bytes: int
    """All weights, in the type they are kept in."""
    kv_element_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_element_bytes


SMOLLM2 = Shape(layers=30, kv_heads=3, head_size=64, linear_parameters=106_168_320, weight_bytes=269_060_552)
"""SmolLM2-135M in bfloat16."""


@dataclass(frozen=True)
class Rates:
    """What the machine can do."""

    read: float
    """Bytes a second."""
    matrix: float
    """Operations a second in large products, a multiplication and an addition being two."""


def single_rate(shape: Shape, rates: Rates) -> float:
    """Return the most output tokens a second of one short stream: each reads all weights."""
    return rates.read / shape.weight_bytes


def workload_rate(shape: Shape, rates: Rates, requests: Sequence[dict[str, Any]]) -> float:
    """Return the most output tokens a second of all requests together."""
    prompts = [len(request["prompt_ids"]) for request in requests]
    outputs: list[int] = [request["max_tokens"] for request in requests]
    # Over a request's steps the context grows from its prompt by one token each.
    tokens_read: int = sum(n * prompt + n * n // 2 for prompt, n in zip(prompts, outputs, strict=True))
    reading = (max(outputs) * shape.weight_bytes + shape.kv_bytes * tokens_read) / rates.read
    arithmetic = 2 * shape.linear_parameters * sum(prompts) / rates.matrix
    return sum(outputs) / (reading + arithmetic)


def median_seconds(call: Callable[[], object], runs: int = 9) -> float:
    """Return the median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)[runs // 2]


def read_rate(size: int, *, huge: bool) -> float:
    """Return bytes a second of a dot product of `size` bytes with themselves: it reads each once."""
    import torch

    area = mmap.mmap(-1, size + 2 * HUGE_PAGE)
    area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    data = torch.frombuffer(area, dtype=torch.float32)[: size // 4].fill_(1)
    return size / median_seconds(lambda: torch.dot(data, data))


def matrix_rate(size: int = MATRIX) -> float:
    """Return operations a second of a product of square matrices, in bfloat16 or float32: the faster of the two."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    half_a, half_b = a.bfloat16(), b.bfloat16()
    seconds = min(median_seconds(lambda: a @ b), median_seconds(lambda: half_a @ half_b))
    return 2 * size**3 / seconds


class PlainFloor:
    """The floor with plain pages, to be looked at again and again: machines drift, and a look takes 0.2 s."""

    def __init__(self, requests: Sequence[dict[str, Any]], shape: Shape) -> None:
        import torch

        self._requests, self._shape = requests, shape
        area = mmap.mmap(-1, shape.weight_bytes + HUGE_PAGE)
        area.madvise(mmap.MADV_NOHUGEPAGE)
        self._data = torch.frombuffer(area, dtype=torch.float32)[: shape.weight_bytes // 4].fill_(1)
        self._square = torch.randn(MATRIX, MATRIX).bfloat16()

    def look(self) -> dict[str, float]:
        """Return most output tokens a second of one stream and of the workload, and the rate of products."""
        import torch

        read = self._shape.weight_bytes / median_seconds(lambda: torch.dot(self._data, self._data), 5)
        matrix = 2 * MATRIX**3 / median_seconds(lambda: self._square @ self._square, 3)
        rates = Rates(read, matrix)
        return {
            "single_tok_s": single_rate(self._shape, rates),
            "mixed_tok_s": workload_rate(self._shape, rates, self._requests),
            "matrix_tflop_s": matrix / 1e12,
        }


def measure(requests: Sequence[dict[str, Any]], shape: Shape) -> dict[str, Any]:
    """Return rates and floors, with plain and with huge pages."""
    import torch

    matrix = matrix_rate()
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "matrix_tflop_s": matrix / 1e12}
    for name, huge in (("plain", False), ("huge", True)):
        rates = Rates(read_rate(shape.weight_bytes, huge=huge), matrix)
        found[name] = {
            "read_gb_s": rates.read / 1e9,
            "single_tok_s": single_rate(shape, rates),
            "mixed_tok_s": workload_rate(shape, rates, requests),
        }
    return found


def main() -> None:
    """Measure, print, and write the figures where a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", type=Path, nargs="?", default=WORKLOAD)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--weight-bytes", type=int, default=SMOLLM2.weight_bytes)
    arguments = parser.parse_args()
    shape = Shape(**{**vars(SMOLLM2), "weight_bytes": arguments.weight_bytes})
    found = measure(json.loads(arguments.workload.read_text()), shape)
    if arguments.output:
        arguments.output.write_text(json.dumps(found))
    print(f"matrix products {found['matrix_tflop_s']:.2f} TFLOP/s, {found['threads']} threads")
    for name in ("plain", "huge"):
        rates = found[name]
        print(
            f"{name} pages: read {rates['read_gb_s']:.1f} GB/s, one stream {rates['single_tok_s']:.0f} tok/s, "
            f"workload {rates['mixed_tok_s']:.0f} tok/s"
        )


if __name__ == "__main__":
    main()
