"""The attention contract: one object that writes K and V into pages and attends over them.

Shapes: N tokens and R requests in a step; H query heads, K KV heads, D head size; B tokens a block. Tokens of
one request are neighbours, in order of position; requests may be in any mix of prefill chunks and decodes.

Every request's last token is at `seq_lens[r] - 1`, its first in this step at `seq_lens[r] - query_lens[r]`.
Rows of q, k and v may lie apart (views of a stacked product); out is contiguous, and so is each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces.kv_cache import KVCacheGroup

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionLayer", "AttentionSpec", "CacheSpec"]


@dataclass(frozen=True)
class AttentionSpec:
    """What a model asks of a backend: one for each kind of layer it has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Of Q, K, V and the output: the name of a torch dtype."""
    kv_dtype: str
    block_size: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True
    """False: every token of a request sees all of them (encoders); the whole prompt comes in one step then."""


@dataclass(frozen=True)
class CacheSpec:
    """How a backend stores one layer: bytes of one page of one layer, padding and scales included."""

    page_bytes: int


@dataclass(frozen=True)
class AttentionLayer:
    """The handle of one layer: fixed when the model is built, passed to every call."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies Q·K before the soft cap and the softmax."""
    window: int | None = None
    """None, or w: a token sees itself and the w - 1 tokens before it."""
    soft_cap: float | None = None
    """c: scores become c · tanh(score / c), before masking."""
    sinks: Any = None
    """[H] float32 logits that join the softmax's denominator, or None."""
    causal: bool = True
    """False: a token sees all `seq_lens[r]` tokens of its request."""


@dataclass(frozen=True)
class AttentionBatch:
    """A step's shape, as the runner hands it to `prepare`; host tensors on CPU, the others on the device.

    The runner may reuse the memory for the next step: copy what must outlive this one.
    """

    query_start: torch.Tensor
    """[R + 1] int32, host: tokens of request r are [query_start[r], query_start[r + 1])."""
    seq_lens: torch.Tensor
    """[R] int32, host: tokens with KV after this step."""
    positions: torch.Tensor
    """[N] int64, device."""
    block_table: torch.Tensor
    """[R, max_blocks] int32, device: this KV group's block ids. Entries past a request's length, and behind
    its window, hold any valid id and must not be read."""
    slot_mapping: torch.Tensor
    """[N] int64, device: block_id · B + offset, where token n's K and V go."""
    max_query_len: int
    max_seq_len: int

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.seq_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.positions.shape[0])


@runtime_checkable
class AttentionBackend(Protocol):
    """One object an engine and rank. `prepare` once a step and KV group, the rest once a layer.

    `AttentionBackendSuite` of `headrace.testing` proves a backend right.
    """

    name: str
    row_invariant: bool
    """A token's output depends, bit for bit, on its own request alone: not on neighbours, chunks or threads."""

    @property
    def numerics(self) -> str:
        """What decides the last bit of its results besides their inputs: versions, instruction tier, sources.

        Part of the engine's numerics fingerprint.
        """
        ...

    graph: Literal["never", "decode", "always"]
    """When calls may be captured in a device graph."""

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        """Reasons why this backend cannot serve `spec` on `device`, in words for a user; empty: it can."""
        ...

    def layout(self, spec: AttentionSpec) -> CacheSpec:
        """How it stores a layer of `spec`; called before the pool is sized."""
        ...

    def allocate(self, spec: AttentionSpec, num_blocks: int, device: str) -> Any:
        """Return one layer's cache for block ids [0, num_blocks), in whatever form the backend likes."""
        ...

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Any:
        """Return the metadata `md` that `write` and `forward` get in this step for this group's layers.

        into: metadata of an earlier step of the group, to be overwritten and returned: what a recorded pass reads.
            Only asked of a backend whose `graph` is not "never".
        """
        ...

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Any, md: Any) -> None:
        """Store k, v [N, K, D] at the slots of `md`; before `forward`, always."""
        ...

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Any,
        md: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend with q [N, H, D] over K and V **from the cache only**; fill out [N, H, D].

        `lse` [N, H] float32, if given, gets the natural logarithm of the sum of exponentials, sinks included.
        """
        ...
