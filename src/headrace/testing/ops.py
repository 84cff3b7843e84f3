"""The conformance suite of op sets: subclass it, say how to make yours, run pytest.

    class TestMine(OpSetSuite):
        def make(self):
            return MyOps()

Ops that the set lacks are skipped: an engine takes them from the reference set.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import torch

from headrace.core.interfaces import ChannelWeight, LinearFormat, Op, OpSet, SummedProduct
from headrace.testing.compare import ROWS, check_close
from headrace.testing.invariance import prove_rows_invariant
from headrace.testing.quantized import check_grouped, check_w8a8, grouped_weights, prove_quantized_rows
from headrace.testing.reference import REFERENCE_OPS
from headrace.testing.sampling import check_draws, check_scores
from headrace.testing.sums import check_sums

__all__ = ["OpSetSuite"]

ARGUMENTS = {
    "embedding": 2,
    "rms_norm": 3,
    "add_rms_norm": 4,
    "rotary": 4,
    "silu_mul": 1,
    "layer_norm": 4,
    "gelu": 1,
    "gelu_mul": 1,
    "add": 2,
    "scale": 2,
    "narrow": 2,
    "draw": 7,
    "score": 3,
}
"""How many arguments each built-in op is called with."""

TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""By dtype: |got - right| ≤ tolerance · (1 + |right|), element by element."""

EPS = 1e-5


class OpSetSuite:
    """Proves an op set against float64, op by op, and the row-invariance of each op that claims it.

    Override `make`; `device` and `dtypes` where the set is not for float32 and bfloat16 on a CPU.
    """

    device = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rows: tuple[int, ...] = (1, 2, 7, 16, 33)
    """Numbers of rows the ops are compared on."""
    widths: tuple[int, ...] = (576, 64, 100)
    """Numbers of columns."""

    def make(self) -> OpSet:
        """Return the op set to test, new for each test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self) and return an op set")

    def test_declarations(self) -> None:
        """Names agree, functions take the arguments the table says, unknown names give None."""
        ops = self.make()
        _check(isinstance(ops.name, str) and bool(ops.name), "name must be a text")
        _check(isinstance(ops.numerics, str), "numerics must be a text")
        _check(ops.get("no-such-op") is None, "get of an unknown name must return None")
        _check(ops.linear("no-such-format") is None, "linear of an unknown format must return None")
        for device, dtype in ((self.device, "no-such-dtype"), ("no-such-device", self.dtypes[0])):
            reasons = ops.why_not(device, dtype)
            words = isinstance(reasons, list) and bool(reasons) and all(isinstance(r, str) for r in reasons)
            _check(words, f"why_not({device!r}, {dtype!r}) must return reasons, got {reasons!r}")
        for name, count in ARGUMENTS.items():
            op = ops.get(name)
            if op is not None:
                _check(op.name == name, f"get({name!r}) returned an op called {op.name!r}")
                _check(isinstance(op.row_invariant, bool), f"{name}: row_invariant must be a bool")
                _check(_accepts(op.fn, count), f"{name} must take {count} positional arguments")

    def test_embedding(self) -> None:
        """Rows of a table, copied exactly."""
        self._compare("embedding", self._embedding_inputs, self.widths, tolerance=0.0)

    def test_rms_norm(self) -> None:
        """Over [N, C]."""
        self._compare("rms_norm", self._norm_inputs, self.widths)

    def test_rms_norm_by_head(self) -> None:
        """Over the last axis of [N, H, C], as query and key norms have it."""
        self._compare("rms_norm", self._head_norm_inputs, (64, 128))

    def test_add_rms_norm(self) -> None:
        """The norm of a sum, and the sum."""
        self._compare("add_rms_norm", self._add_norm_inputs, self.widths)

    def test_rotary(self) -> None:
        """Halves rotated, in place."""
        self._compare("rotary", self._rotary_inputs, (64, 128, 32), in_place=(1, 2))

    def test_rotary_of_a_part(self) -> None:
        """A table for half of a head: the rest stays as it is."""
        self._compare("rotary", self._part_rotary_inputs, (64, 128, 32), in_place=(1, 2))

    def test_layer_norm(self) -> None:
        """Mean taken off, variance to one, weight and bias."""
        self._compare("layer_norm", self._layer_norm_inputs, self.widths)

    def test_gelu(self) -> None:
        """With the error function, to its ends."""
        self._compare("gelu", self._activation_inputs, self.widths)

    def test_add(self) -> None:
        """Sums, element by element."""
        self._compare("add", self._pair_inputs, self.widths)

    def test_scale(self) -> None:
        """Multiples, element by element."""
        self._compare("scale", self._scale_inputs, self.widths)

    def test_silu_mul(self) -> None:
        """Gated activation."""
        self._compare("silu_mul", self._gate_inputs, self.widths)

    def test_gelu_mul(self) -> None:
        """Gated activation, with the approximation by tanh."""
        self._compare("gelu_mul", self._gate_inputs, self.widths)

    def test_linear(self) -> None:
        """`dense` weights, with and without a bias."""
        format = self._format("dense")
        for dtype in self._dtypes():
            for rows in self.rows:
                for width, outputs in zip(self.widths, (192, 40, 7), strict=False):
                    for has_bias in (False, True):
                        x, weight, bias = self._linear_inputs(dtype, rows, width, outputs)
                        bias = bias if has_bias else None
                        right = REFERENCE_OPS["linear"](x, weight, bias)
                        got = format.apply(x, format.prepare(weight, bias))
                        what = f"linear {dtype} [{rows}, {width}] -> {outputs}, bias {has_bias}"
                        _check(got.dtype == x.dtype, f"{what}: dtype {got.dtype}")
                        check_close(got, right, TOLERANCES[dtype], what)

    def test_gated_linear(self) -> None:
        """`dense` weights of gate and up in one go, where the format can."""
        format = self._format("dense")
        for dtype, op, outputs in itertools.product(self._dtypes(), ("silu_mul", "gelu_mul"), (192, 40, 7)):
            x, weight, bias = self._linear_inputs(dtype, 33, 96, 2 * outputs)
            for given in (None, bias):
                gated = format.gated(weight, given, op)
                if gated is None:
                    raise SkipTest(f"the format has no product gated by {op}")
                right = REFERENCE_OPS[op](REFERENCE_OPS["linear"](x, weight, given))
                got = gated(x)
                what = f"gated linear {op} {dtype} -> {outputs}, bias {given is not None}"
                _check(got.dtype == x.dtype, f"{what}: dtype {got.dtype}")
                check_close(got, right, TOLERANCES[dtype], what)

    def test_narrow(self) -> None:
        """Sums in the types that are computed in, rounded to nearest."""
        op = self._op("narrow")
        for dtype, width in itertools.product(self._dtypes(), self.widths):
            x = self._draw("float32", 33, width)
            got = op.fn(x, getattr(torch, dtype))
            _check(torch.equal(got, x.to(getattr(torch, dtype))), f"narrow {dtype} [33, {width}]")

    def test_sums_of_a_gated_linear(self) -> None:
        """Bit by bit: what is finished from sums is what comes at once, and sums lie where segments say."""
        format = self._format("dense")
        for dtype, op, outputs in itertools.product(self._dtypes(), ("silu_mul", "gelu_mul"), (192, 40, 7)):
            x, weight, bias = self._linear_inputs(dtype, 33, 96, 2 * outputs)
            for given in (None, bias):
                gated = format.gated(weight, given, op)
                if not isinstance(gated, SummedProduct):
                    raise SkipTest(f"the format's product gated by {op} has no sums")
                right = REFERENCE_OPS["linear"](x, weight, given)
                what = f"gated linear {op} {dtype} -> {outputs}, bias {given is not None}"
                check_sums(gated, x, right, TOLERANCES["float32"], what)

    def test_grouped_linear(self) -> None:
        """`grouped` weights: their numbers exactly, products, stacks of many kinds, and gated products."""
        format = self._format("grouped")
        for dtype in self._dtypes():
            check_grouped(format, self._draw, dtype, TOLERANCES[dtype])

    def test_grouped_row_invariance(self) -> None:
        """Bit by bit: rows of a batch as each alone, for weights of every number of bits."""
        format = self.make().linear("grouped")
        if format is None or not format.row_invariant:
            raise SkipTest("the op set has no linear format 'grouped' that claims row_invariant")
        kinds = grouped_weights(37, 256)
        for dtype in self._dtypes():
            x = self._draw(dtype, max(ROWS), 256)
            for what, weight in kinds[::5] + kinds[-4:]:
                prove_quantized_rows(format, [weight], x, f"{what}, {dtype}")

    def test_w8a8_linear(self) -> None:
        """`w8a8` weights: their numbers exactly, products with rounded rows, logits and gated products."""
        format = self._format("w8a8")
        for dtype in self._dtypes():
            check_w8a8(format, self._draw, dtype, TOLERANCES[dtype])
            if format.row_invariant:
                x = self._draw(dtype, max(ROWS), 100)
                weight = ChannelWeight(self._integers(127, 3700).view(37, 100).to(torch.int8), torch.ones(37))
                prove_quantized_rows(format, [weight], x, f"w8a8, {dtype}")

    def test_draw(self) -> None:
        """Draws over a vocabulary: the tokens that the executor's own draws."""
        op = self._op("draw")
        check_draws(op.fn, row_invariant=op.row_invariant)

    def test_score(self) -> None:
        """Log-probabilities over a vocabulary, ranks and the likeliest."""
        op = self._op("score")
        check_scores(op.fn, row_invariant=op.row_invariant)

    def test_row_invariance(self) -> None:
        """Bit by bit: rows of a batch as each alone, for every op that claims it."""
        ops = self.make()
        inputs: dict[str, Callable[[str, int, int], list[Any]]] = {
            "embedding": self._embedding_inputs,
            "rms_norm": self._norm_inputs,
            "add_rms_norm": self._add_norm_inputs,
            "rotary": self._rotary_inputs,
            "silu_mul": self._gate_inputs,
            "layer_norm": self._layer_norm_inputs,
            "gelu": self._activation_inputs,
            "add": self._pair_inputs,
            "scale": self._scale_inputs,
            "gelu_mul": self._gate_inputs,
        }
        claims = [op for name in inputs if (op := ops.get(name)) is not None and op.row_invariant]
        format = ops.linear("dense")
        if not claims and not (format and format.row_invariant):
            raise SkipTest(f"no op of {ops.name} claims row_invariant")
        for dtype in self._dtypes():
            for op in claims:
                for width in (64, 32) if op.name == "rotary" else self.widths:
                    self._prove(op, inputs[op.name](dtype, max(ROWS), width), f"{op.name} {dtype} {width}")
            if format is not None and format.row_invariant:
                for width, outputs in ((576, 192), (100, 37)):
                    x, weight, bias = self._linear_inputs(dtype, max(ROWS), width, outputs)
                    what = f"linear {dtype} {width} -> {outputs}"
                    self._prove(Op("linear", format.apply), [x, format.prepare(weight, bias)], what)
                    self._prove(
                        Op("logits", format.logits), [x, format.prepare(weight, bias)], f"logits, {what}"
                    )
                    gated = format.gated(torch.cat([weight, weight.flip(0)]), None, "silu_mul")
                    if gated is not None:
                        self._prove(Op("gated", gated), [x], f"gated {what}")

    def _prove(self, op: Op, inputs: list[Any], what: str) -> None:
        def call(rows: slice) -> tuple[torch.Tensor, ...]:
            given = [
                value[rows].clone() if torch.is_tensor(value) and value.shape[0] == max(ROWS) else value
                for value in inputs
            ]
            result = op.fn(*given)
            return result if isinstance(result, tuple) else (result,)

        prove_rows_invariant(call, what)

    def _compare(
        self,
        name: str,
        make_inputs: Callable[[str, int, int], list[Any]],
        widths: tuple[int, ...],
        *,
        tolerance: float | None = None,
        in_place: tuple[int, ...] = (),
    ) -> None:
        """Run an op on every dtype, row count and width, and compare results and what became of the inputs."""
        op = self._op(name)
        for dtype in self._dtypes():
            for rows in self.rows:
                for width in widths:
                    inputs = make_inputs(dtype, rows, width)
                    before = [value.clone() if torch.is_tensor(value) else value for value in inputs]
                    right = REFERENCE_OPS[name](*before)
                    got = op.fn(*inputs)
                    what = f"{name} {dtype} [{rows}, {width}]"
                    rights = right if isinstance(right, tuple) else (right,)
                    gots = got if isinstance(got, tuple) else (got,)
                    _check(len(gots) == len(rights), f"{what}: {len(gots)} results, right are {len(rights)}")
                    for result, exact in zip(gots, rights, strict=True):
                        _check(result.dtype == getattr(torch, dtype), f"{what}: dtype {result.dtype}")
                        check_close(
                            result, exact, TOLERANCES[dtype] if tolerance is None else tolerance, what
                        )
                    for i, value in enumerate(inputs):
                        if torch.is_tensor(value) and i not in in_place:
                            _check(torch.equal(value, before[i]), f"{what}: argument {i} was changed")
                    for result, i in zip(gots, in_place, strict=False):
                        same = torch.equal(inputs[i], result) and result.data_ptr() == inputs[i].data_ptr()
                        _check(same, f"{what}: argument {i} must be changed in place and returned")

    def _op(self, name: str) -> Op:
        op = self.make().get(name)
        if op is None:
            raise SkipTest(f"the op set has no {name}")
        return op

    def _format(self, name: str) -> LinearFormat:
        format = self.make().linear(name)
        if format is None:
            raise SkipTest(f"the op set has no linear format {name!r}")
        return format

    def _dtypes(self) -> list[str]:
        ops = self.make()
        refused = {dtype: ops.why_not(self.device, dtype) for dtype in self.dtypes}
        served = [dtype for dtype, reasons in refused.items() if not reasons]
        if not served:
            raise SkipTest(f"{ops.name} refuses: {refused}")
        return served

    def _draw(self, dtype: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape) * 31 + len(shape))
        values = torch.randn(shape, generator=generator) * scale
        return values.to(getattr(torch, dtype)).to(self.device)

    def _integers(self, below: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(below, (count,), generator=generator).to(self.device)

    def _embedding_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        return [self._integers(50, rows), self._draw(dtype, 50, width)]

    def _norm_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        return [self._draw(dtype, rows, width, scale=3.0), self._draw(dtype, width), EPS]

    def _head_norm_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        # Rows lie apart, as where queries are a view of a stacked product.
        x = self._draw(dtype, rows, 7, width, scale=3.0)[:, 1:6]
        return [x, self._draw(dtype, width), EPS]

    def _add_norm_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        x, weight, eps = self._norm_inputs(dtype, rows, width)
        return [x, self._draw(dtype, rows, width).flip(0), weight, eps]

    def _rotary_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        angles = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(width // 2) * 2 / width)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(self.device)
        stacked = self._draw(dtype, rows, 8, width)
        return [self._integers(64, rows), stacked[:, :6], stacked[:, 6:], table]

    def _part_rotary_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        *inputs, _ = self._rotary_inputs(dtype, rows, width)
        return [*inputs, self._rotary_inputs(dtype, rows, width // 2)[-1]]

    def _pair_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        x = self._draw(dtype, rows, width, scale=3.0)
        return [x, x.flip(0).flip(1)]

    def _scale_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        return [self._draw(dtype, rows, width, scale=3.0), 0.22]

    def _gate_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        return [self._draw(dtype, rows, 2 * width, scale=3.0)]

    def _layer_norm_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        x = self._draw(dtype, rows, width, scale=3.0) + 2
        return [x, self._draw(dtype, width), self._draw(dtype, 1, width).view(-1).flip(0), EPS]

    def _activation_inputs(self, dtype: str, rows: int, width: int) -> list[Any]:
        return [self._draw(dtype, rows, width, scale=3.0)]

    def _linear_inputs(
        self, dtype: str, rows: int, width: int, outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weight = self._draw(dtype, outputs, width, scale=width**-0.5)
        return self._draw(dtype, rows, width), weight, self._draw(dtype, outputs)


def _accepts(fn: Callable[..., Any], count: int) -> bool:
    """Whether `fn` can be called with `count` positional arguments; True where it does not say."""
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
