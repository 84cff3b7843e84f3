"""The reference attention backend: paged K and V in plain torch.

It is what other backends are measured by on a device, and what runs where no faster one does. Scores and sums are
float32 whatever the inputs' type (inside `scaled_dot_product_attention`, too). K and V are read from the cache
only, and only slots that a query sees: those of other requests, of unused blocks and behind a partly filled
block's end may hold anything, NaN included.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from headrace.backends.torch_reference.numerics import torch_numerics
from headrace.backends.torch_reference.paging import PagedCache, Piece, StepPages
from headrace.backends.torch_reference.whole import rounded_rows
from headrace.core.interfaces.attention import AttentionBatch, AttentionLayer, AttentionSpec, CacheSpec
from headrace.core.interfaces.kv_cache import KVCacheGroup

__all__ = ["TorchAttention"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES = ("cpu", "cuda")
INT8 = "int8"
"""The KV dtype of whole numbers, with float32 scales for each token and head."""


class TorchAttention:
    """Attention over pages [num_blocks, K, B, D]; every feature of `AttentionSpec`, any head size.

    torch's sums change with the shape of a batch, hence `row_invariant = False`: in float32 tokens agree with any
    other batch but for ties.
    """

    name = "torch"
    row_invariant = False
    graph: Literal["never", "decode", "always"] = "never"

    @property
    def numerics(self) -> str:
        """torch, and the instructions it takes."""
        return torch_numerics()

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        """Reasons why it cannot serve `spec` on `device`; empty: it can."""
        reasons = []
        if device.split(":")[0] not in _DEVICES:
            reasons.append(f"device {device} (runs on: {', '.join(_DEVICES)})")
        for what, dtype, served in (
            ("dtype", spec.dtype, tuple(_DTYPES)),
            ("KV dtype", spec.kv_dtype, (*_DTYPES, INT8)),
        ):
            if dtype not in served:
                reasons.append(f"{what} {dtype} (serves: {', '.join(served)})")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads are no multiple of {spec.num_kv_heads} KV heads")
        if spec.window is not None and not spec.causal:
            reasons.append("a window in a layer that is not causal")
        return reasons

    def layout(self, spec: AttentionSpec) -> CacheSpec:
        """K and V as they are, no padding; as bytes with a float32 scale for each token and head of both."""
        tokens = 2 * spec.block_size * spec.num_kv_heads
        if spec.kv_dtype == INT8:
            return CacheSpec(page_bytes=tokens * (spec.head_dim + torch.float32.itemsize))
        return CacheSpec(page_bytes=tokens * spec.head_dim * _DTYPES[spec.kv_dtype].itemsize)

    def allocate(self, spec: AttentionSpec, num_blocks: int, device: str) -> PagedCache:
        """Pages for block ids [0, num_blocks); not filled, so that the memory is touched when it is used."""
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        whole = spec.kv_dtype == INT8
        dtype = torch.int8 if whole else _DTYPES[spec.kv_dtype]
        k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        if not whole:
            return PagedCache(k, v)
        k_scales, v_scales = (torch.empty(shape[:3], device=device) for _ in range(2))
        return PagedCache(k, v, k_scales, v_scales)

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> StepPages:
        """Copy what the step's layers need from the batch."""
        return StepPages(batch)

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Any, md: Any) -> None:
        """Store k, v [N, K, D] at the step's slots."""
        targets = md.targets(cache)
        for pages, scales, values in ((cache.k, cache.k_scales, k), (cache.v, cache.v_scales, v)):
            rows = values.reshape(-1, layer.head_dim)
            if scales is not None:
                rows, own = rounded_rows(rows)
                scales.view(-1).index_copy_(0, targets, own.view(-1))
            pages.view(-1, layer.head_dim).index_copy_(0, targets, rows.to(pages.dtype))

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Any,
        md: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend with q [N, H, D]; fill out [N, H, D] and, if given, lse [N, H] (sinks included)."""
        for piece in md.pieces(cache, layer.window, causal=layer.causal):
            queries = _split_heads(q[piece.rows], layer, piece)
            k, v = _gather(cache, piece)
            if layer.soft_cap is None and layer.sinks is None and lse is None and k.dtype == q.dtype:
                shared = (-1, queries.shape[1], -1, -1)
                result = F.scaled_dot_product_attention(
                    queries,
                    k.unsqueeze(1).expand(shared),
                    v.unsqueeze(1).expand(shared),
                    attn_mask=piece.visible,
                    is_causal=layer.causal and piece.visible is None,
                    scale=layer.scale,
                )
            else:
                result, sums = _attend(queries.float(), k.float(), v.float(), layer, piece)
                if lse is not None:
                    lse[piece.rows] = _join_heads(sums.unsqueeze(-1), layer, piece).squeeze(-1)
            out[piece.rows] = _join_heads(result, layer, piece).to(out.dtype)


def _gather(cache: PagedCache, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece's K and V, each [n · K, S, D], with unused slots zeroed."""
    head_dim = cache.k.shape[-1]
    found = []
    for pages, scales in ((cache.k, cache.k_scales), (cache.v, cache.v_scales)):
        flat = pages.view(-1, cache.block_size * head_dim).index_select(0, piece.pages)
        if scales is not None:
            own = scales.view(-1, cache.block_size, 1).index_select(0, piece.pages)
            flat = (flat.view(-1, cache.block_size, head_dim) * own).view(flat.shape)
        if piece.unused is not None:
            # A probability of zero does not undo a NaN in V, nor a mask one in K.
            flat.view(-1, head_dim).index_fill_(0, piece.unused, 0)
        rows = piece.num_requests * cache.num_kv_heads
        found.append(flat.view(rows, -1, head_dim)[:, piece.slots])
    return found[0], found[1]


def _split_heads(q: torch.Tensor, layer: AttentionLayer, piece: Piece) -> torch.Tensor:
    """[rows, H, D] -> [n · K, 1, G, D] for decodes, [K, G, rows, D] for a chunk; G query heads a KV head."""
    num_kv, head_dim = layer.num_kv_heads, layer.head_dim
    if piece.is_decode:
        return q.reshape(piece.num_requests * num_kv, 1, -1, head_dim)
    return q.reshape(q.shape[0], num_kv, -1, head_dim).permute(1, 2, 0, 3)


def _join_heads(x: torch.Tensor, layer: AttentionLayer, piece: Piece) -> torch.Tensor:
    """Undo `_split_heads`: -> [rows, H, X]."""
    if piece.is_decode:
        return x.reshape(piece.num_requests, layer.num_heads, -1)
    return x.permute(2, 0, 1, 3).reshape(x.shape[2], layer.num_heads, -1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, float32: q as split, k and v [n · K, S, D] -> (like q, its log-sum-exp)."""
    shape = (*q.shape[:-1], k.shape[1])
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).view(shape).mul_(layer.scale)
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    visible = piece.visible
    if visible is None:
        visible = torch.ones(shape[-2:], dtype=torch.bool, device=q.device)
        visible = visible.tril_() if layer.causal else visible
    scores = torch.where(visible, scores, -torch.inf)
    sums = torch.logsumexp(scores, dim=-1)
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(layer.num_kv_heads, -1)
        by_row = sinks.repeat(piece.num_requests, 1).unsqueeze(1) if piece.is_decode else sinks.unsqueeze(2)
        sums = torch.logaddexp(sums, by_row)
    weights = scores.sub_(sums.unsqueeze(-1)).exp_()
    return torch.bmm(weights.flatten(1, 2), v).view(q.shape), sums
