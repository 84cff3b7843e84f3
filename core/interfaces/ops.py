"""The op set: an open table of the operations models are made of.

A model asks for each op once, when it is built, and calls what it got. Built-in names and signatures (x is
[N, …], contiguous but where said; results are new, contiguous tensors unless said otherwise):

=================  ============================================================================
`embedding`        (ids [N] int64, weight [V, C]) -> [N, C]
`rms_norm`         (x [N, C] or [N, G, C], weight [C], eps) -> like x; statistics in float32. Rows N of x may
                   lie apart, as in a view of a stacked product
`add_rms_norm`     (x, residual, weight, eps) -> (normed, x + residual)
`rotary`           (positions [N], q [N, H, D], k [N, K, D], cos_sin [P, R]) -> (q, k); in place, the first R
                   numbers of each head, halves against each other. Rows N may lie apart
`layer_norm`       (x [N, C], weight [C], bias [C], eps) -> like x; statistics in float32
`gelu`             (x [N, C]) -> x · Φ(x), exact (no approximation by tanh)
`silu_mul`         (x [N, 2·C]) -> silu(x[:, :C]) · x[:, C:]
`add`              (x [N, C], y [N, C]) -> x + y
`scale`            (x [N, C], factor) -> x · factor, computed in float32
`gelu_mul`         (x [N, 2·C]) -> gelu(x[:, :C]) · x[:, C:], with gelu's approximation by tanh
`narrow`           (x [N, C] float32, dtype) -> x in another type, rounded to nearest
`linear`           by weight format: a `LinearFormat`, see below
=================  ============================================================================

Two more are the sampler's, over logits [S, V] float32 on the host, contiguous, none NaN, one in each row above -inf.
A set need not have them: the executor has its own.

=================  ============================================================================
`draw`             (logits, best [S] int64, keys [S] int64, temperature [S] float64, top_k [S] int64,
                   top_p [S] float64, log_min_p [S] float64) -> ids [S] int64. `best`: the largest logit's id, which
                   is the answer at temperature 0. `keys`: where each row's noise starts
                   (`headrace.executors.noise`). top_k 0, top_p 1 and log_min_p -inf filter nothing. An id must be the
                   one `headrace.executors.candidates` draws; -1 leaves the row to it
`score`            (logits, ids [S] int64, k) -> (totals [S] float64: log of the sum of e^logit; ranks [S] int64: of
                   each id, from 1; likeliest [S, k] int64: by falling logit), ties by lower id; 0 <= k <= V
=================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces.attention import AttentionBackend
    from headrace.core.interfaces.graph import GraphRecorder

__all__ = ["LinearFormat", "Op", "OpSet"]


@dataclass(frozen=True)
class Op:
    """One implementation of an op."""

    name: str
    fn: Callable[..., Any]
    row_invariant: bool = False
    """A row of the result depends, bit for bit, on that row of the input alone."""
    recorded: Any = None
    """For `GraphRecorder.including`, where another set's recorder is to note its calls."""


class LinearFormat(Protocol):
    """How weights of one format are held and multiplied."""

    row_invariant: bool

    def prepare(self, weight: Any, bias: torch.Tensor | None) -> Any:
        """Turn a weight [out, in] as loaded into what `apply` wants; may pack. Called once.

        weight: for `dense` a tensor; for other formats a list of `QuantizedWeight`, stacked over outputs. Raises
            `CheckpointError` for one it cannot hold.
        """
        ...

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        ...

    def gated(
        self, weight: Any, bias: torch.Tensor | None, op: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return [N, in] -> [N, out]: activation(gate(x)) · up(x) in one go, rounded once.

        weight: [2 · out, in] as for `prepare`, the gate's rows first. op: `silu_mul` or `gelu_mul`. None:
        this format has no such product; it is multiplied, then the op applied. One that is a `SummedProduct`, too,
        keeps its speed where plugins add to products.
        """
        ...

    def logits(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out] float32: the same product, as it is sampled from."""
        ...

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [N] int64 of the weight, [N, in] in `dtype`: a lookup in an embedding that is a product, too."""
        ...


@runtime_checkable
class OpSet(Protocol):
    """Implementations for one kind of device. An op it lacks is taken from the torch reference set."""

    name: str

    @property
    def numerics(self) -> str:
        """What decides the last bit of its results besides their inputs; part of the numerics fingerprint."""
        ...

    def why_not(self, device: str, dtype: str) -> list[str]:
        """Reasons why this set cannot serve; empty: it can."""
        ...

    def get(self, name: str) -> Op | None:
        """Return the implementation of `name`, or None."""
        ...

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """Return what records passes over these ops and `backend`'s attention; None: they are not recorded."""
        ...

    def linear(self, format: str) -> LinearFormat | None:
        """Return how weights of `format` (`"dense"`, or a quantization plugin's word) run, or None."""
        ...
