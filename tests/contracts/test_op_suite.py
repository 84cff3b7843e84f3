"""The op suite catches op sets that are wrong, each in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import pytest
import torch

from headrace.backends.torch_reference import ops as torch_ops
from headrace.core.interfaces import LinearFormat, Op, OpSet
from headrace.executors.scoring import score
from headrace.testing import OpSetSuite


class Changed(torch_ops.TorchOps):
    """The reference with one op replaced."""

    def __init__(self, name: str, fn: Callable[..., Any], *, row_invariant: bool = False) -> None:
        super().__init__()
        self._ops[name] = Op(name, fn, row_invariant)


class OwnLinear(torch_ops.TorchOps):
    """The reference with another dense format."""

    def __init__(self, format: LinearFormat) -> None:
        super().__init__()
        self._linear["dense"] = format


def suite(made: OpSet) -> OpSetSuite:
    class Suite(OpSetSuite):
        def make(self) -> OpSet:
            return made

    return Suite()


def interleaved(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    """Pairs of neighbours instead of halves."""
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    for x in (q, k):
        even, odd = x[..., ::2].float(), x[..., 1::2].float()
        x[..., ::2], x[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
    return q, k


def not_in_place(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
    return torch_ops.rotary(positions, q.clone(), k.clone(), table)


def swapped_gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(up) * gate


def exact_gelu_gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def in_place_gate(x: torch.Tensor) -> torch.Tensor:
    x[:, : x.shape[1] // 2].clamp_(max=1e9).mul_(2).div_(2.5)
    return torch_ops.silu_mul(x)


def no_epsilon_root(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def old_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return torch_ops.rms_norm(x + residual, weight, eps), residual.clone()


def wide_result(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch_ops.rms_norm(x.double(), weight.double(), eps)


def over_the_batch(x: torch.Tensor) -> torch.Tensor:
    return torch_ops.silu_mul(x) * (1 + 2**-6 * (x.shape[0] > 16))


def about_zero(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """A layer norm that does not take off the mean."""
    return torch_ops.rms_norm(x, weight, eps) + bias


def best_draw(logits: torch.Tensor, best: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return best


def rough_score(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Any:
    """A sum that loses what is small."""
    totals, ranks, likeliest = score(logits, ids, k)
    return totals - 1e-3, ranks, likeliest


def score_with_free_ties(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Any:
    totals, ranks, _ = score(logits, ids, k)
    return totals, ranks, logits.flip(1).topk(k).indices.neg().add(logits.shape[1] - 1)


class ForgetsBias(torch_ops.DenseLinear):
    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        return super().apply(x, (prepared[0], None))


class LyingLinear(torch_ops.DenseLinear):
    row_invariant = True

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        # In halves where there are many rows, as a kernel might that splits over K by batch.
        weight, bias = prepared
        if x.shape[0] < 16:
            return super().apply(x, prepared)
        half = weight.shape[1] // 2
        parts = x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T
        return parts + bias


@pytest.mark.parametrize(
    ("made", "test"),
    [
        (Changed("rotary", interleaved), "test_rotary"),
        (Changed("rotary", not_in_place), "test_rotary"),
        (Changed("silu_mul", swapped_gate), "test_silu_mul"),
        (Changed("silu_mul", in_place_gate), "test_silu_mul"),
        (Changed("gelu_mul", exact_gelu_gate), "test_gelu_mul"),
        (Changed("silu_mul", lambda gate, up: gate), "test_declarations"),
        (Changed("rms_norm", no_epsilon_root), "test_rms_norm"),
        (Changed("rms_norm", no_epsilon_root), "test_rms_norm_by_head"),
        (Changed("rms_norm", wide_result), "test_rms_norm"),
        (Changed("add_rms_norm", old_residual), "test_add_rms_norm"),
        (Changed("layer_norm", about_zero), "test_layer_norm"),
        (Changed("gelu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")), "test_gelu"),
        (Changed("embedding", lambda ids, weight: weight[ids] * 1.0001), "test_embedding"),
        (Changed("silu_mul", over_the_batch, row_invariant=True), "test_row_invariance"),
        (Changed("add", lambda x, y: x.add_(y)), "test_add"),
        (Changed("scale", lambda x, factor: x * (factor + 0.03)), "test_scale"),
        (Changed("draw", best_draw), "test_draw"),
        (Changed("score", rough_score), "test_score"),
        (Changed("score", score_with_free_ties), "test_score"),
        (OwnLinear(ForgetsBias()), "test_linear"),
        (OwnLinear(LyingLinear()), "test_row_invariance"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_broken_op_is_caught(made: OpSet, test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(suite(made), test)()


class NoOps(torch_ops.TorchOps):
    def get(self, name: str) -> Op | None:
        return None


def test_a_missing_op_is_skipped() -> None:
    with pytest.raises(SkipTest, match="no rotary"):
        suite(NoOps()).test_rotary()


def test_make_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="must define make"):
        OpSetSuite().test_rotary()
