"""Linear formats of quantized weights, proved: numbers as the format defines them, products, each row alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.core.interfaces import ChannelWeight, GroupedWeight, LinearFormat
from headrace.testing.compare import ROWS, check_close, check_equal
from headrace.testing.invariance import prove_rows_invariant
from headrace.testing.reference import REFERENCE_OPS

__all__ = ["check_grouped", "check_w8a8", "grouped_numbers", "grouped_weights", "prove_quantized_rows"]

Draw = Callable[..., torch.Tensor]
"""(dtype, *shape, scale=…) -> normally distributed numbers."""


def grouped_numbers(weight: GroupedWeight) -> torch.Tensor:
    """The numbers a weight stands for, [out, in] float32: code by code, as the format's words say."""
    out, inputs = weight.shape
    numbers = torch.empty(out, inputs)
    for column in range(inputs):
        group = column // weight.group_size
        scale = weight.scales[:, group].float()
        low = None if weight.minimums is None else weight.minimums[:, group].float()
        if weight.block_scales is not None:
            block = group // (weight.scales.shape[1] // weight.block_scales.shape[1])
            scale = weight.block_scales[:, block].float() * scale
            if low is not None and weight.block_minimums is not None:
                low = -(weight.block_minimums[:, block].float() * low)
        value = (weight.codes[:, column].float() - weight.zero) * scale
        place = column if weight.order is None else int(weight.order[column])
        numbers[:, place] = value if low is None else value + low
    return numbers


def grouped_weights(out: int, inputs: int, seed: int = 0) -> list[tuple[str, GroupedWeight]]:
    """Weights of every kind that divides `inputs`, with what each is called."""
    generator = torch.Generator().manual_seed(seed)

    def codes(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator, dtype=torch.uint8)

    def scales(groups: int, dtype: torch.dtype) -> torch.Tensor:
        drawn: torch.Tensor = torch.rand(out, groups, generator=generator) + 0.1
        return (drawn * float(inputs**-0.5 / 8)).to(dtype)

    plain = itertools.product(
        (4, 5, 6, 8), (16, 32, 128, inputs), (torch.float16, torch.bfloat16), (False, True)
    )
    found = []
    for bits, group, dtype, lowered in plain:
        if group == inputs:
            dtype = torch.float32
        if inputs % group == 0:
            groups = inputs // group
            low = -scales(groups, dtype) if lowered else None
            zero = 0 if lowered and bits < 8 else 2 ** (bits - 1)
            what = f"{bits} bits, groups of {group}, {dtype}, minimums {lowered}"
            weight = GroupedWeight(codes(2**bits, out, inputs), bits, zero, group, scales(groups, dtype), low)
            found.append((what, weight))
    if inputs % 256 == 0:
        blocks, half = inputs // 256, torch.float16
        signed = codes(256, out, inputs // 16).view(torch.int8)
        lows = (codes(64, out, inputs // 32), codes(64, out, inputs // 32))
        inner = (scales(blocks, half) / 32, scales(blocks, half) / 32)
        found += [
            ("6 bits in blocks", GroupedWeight(codes(64, out, inputs), 6, 32, 16, signed, None, inner[0])),
            ("4 bits in blocks", GroupedWeight(codes(16, out, inputs), 4, 0, 32, *lows, *inner)),
            ("5 bits in blocks", GroupedWeight(codes(32, out, inputs), 5, 0, 32, *lows, *inner)),
        ]
    order = torch.randperm(inputs, generator=generator)
    weight = GroupedWeight(codes(16, out, inputs), 4, 8, inputs, scales(1, torch.float32), order=order)
    return [*found, ("4 bits in another order", weight)]


def check_grouped(format: LinearFormat, draw: Draw, dtype: str, tolerance: float) -> None:
    """Raise `AssertionError` where numbers of `grouped` weights or products with them are wrong."""
    for out, inputs in ((40, 256), (100, 96), (7, 100)):
        weights = grouped_weights(out, inputs)
        x, bias = draw(dtype, 9, inputs), draw(dtype, out)
        for what, weight in weights:
            what = f"{what}, {dtype} {inputs} -> {out}"
            right = grouped_numbers(weight)
            prepared = format.prepare([weight], bias)
            ids = torch.tensor([out - 1, 0, out // 2])
            check_equal(format.rows(ids, prepared, torch.float32), right[ids], f"rows of {what}")
            product = REFERENCE_OPS["linear"](x, right, bias)
            check_close(format.apply(x, prepared), product, tolerance, what)
            logits = format.logits(x, format.prepare([weight], None))
            if logits.dtype != torch.float32:
                raise AssertionError(f"logits of {what}: dtype {logits.dtype}, right is float32")
            check_close(logits, REFERENCE_OPS["linear"](x, right, None), tolerance, f"logits of {what}")
        _check_stack(format, [weight for _, weight in weights], x, tolerance)
        for op, (what, weight) in itertools.product(("silu_mul", "gelu_mul"), weights[:: len(weights) // 4]):
            _check_gated(format, op, weight, x, tolerance, f"gated {op}, {what}, {dtype} {inputs} -> {out}")


def check_w8a8(format: LinearFormat, draw: Draw, dtype: str, tolerance: float) -> None:
    """Raise `AssertionError` where numbers of `w8a8` weights or products with them are wrong."""
    for out, inputs in ((40, 256), (100, 98), (7, 33)):
        codes = (draw("float32", out, inputs) * 40).round().clamp(-127, 127).to(torch.int8)
        scales = draw("float32", out).abs() * inputs**-0.5 / 40
        x, bias, weight = draw(dtype, 9, inputs), draw(dtype, out), ChannelWeight(codes, scales)
        x[3] = 0
        what = f"w8a8 {dtype} {inputs} -> {out}"
        prepared = format.prepare([weight], bias)
        ids = torch.tensor([out - 1, 0, out // 2])
        right = (codes[ids].float() * scales[ids, None]).to(torch.float32)
        check_equal(format.rows(ids, prepared, torch.float32), right, f"rows of {what}")
        # Inputs as they are rounded: after that, products are those of any numbers.
        step = x.float().abs().amax(1, keepdim=True) / 127
        rounded = torch.round(x.float() * torch.where(step > 0, 1 / step, 0.0)) * step.double()
        numbers = codes.double() * scales.double()[:, None]
        check_close(format.apply(x, prepared), rounded @ numbers.T + bias.double(), tolerance, what)
        stack = format.prepare([weight, weight], None)
        twice = torch.cat([numbers, numbers])
        check_close(format.logits(x, stack), rounded @ twice.T, tolerance, f"logits of a stack, {what}")
        for op in ("silu_mul", "gelu_mul"):
            gated = format.gated([weight, weight], None, op)
            if gated is not None:
                check_close(gated(x), REFERENCE_OPS[op](rounded @ twice.T), tolerance, f"gated {op}, {what}")


def _check_stack(
    format: LinearFormat, parts: Sequence[GroupedWeight], x: torch.Tensor, tolerance: float
) -> None:
    """Parts of several kinds, one above the other."""
    right = torch.cat([grouped_numbers(part) for part in parts])
    got = format.apply(x, format.prepare(list(parts), None))
    check_close(got, REFERENCE_OPS["linear"](x, right, None), tolerance, "a stack of many kinds")


def _check_gated(
    format: LinearFormat, op: str, weight: GroupedWeight, x: torch.Tensor, tolerance: float, what: str
) -> None:
    gated = format.gated([weight, weight], None, op)
    if gated is not None:
        right = grouped_numbers(weight)
        product = REFERENCE_OPS["linear"](x, torch.cat([right, right]), None)
        check_close(gated(x), REFERENCE_OPS[op](product), tolerance, what)


def prove_quantized_rows(format: LinearFormat, parts: Sequence[Any], x: torch.Tensor, what: str) -> None:
    """Prove that rows of x [max(ROWS), in] do not disturb each other, in products, logits and gated products."""
    prepared = format.prepare(list(parts), None)
    gated = format.gated([*parts, *parts], None, "silu_mul")
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "product": lambda rows: format.apply(rows, prepared),
        "logits": lambda rows: format.logits(rows, prepared),
        **({} if gated is None else {"gated": gated}),
    }
    if x.shape[0] != max(ROWS):
        raise ValueError(f"x must have {max(ROWS)} rows, it has {x.shape[0]}")
    for name, call in calls.items():
        _prove(call, x, f"{name} of {what}")


def _prove(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, what: str) -> None:
    prove_rows_invariant(lambda rows: (call(x[rows].clone()),), what)
