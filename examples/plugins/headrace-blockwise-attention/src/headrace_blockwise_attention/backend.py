"""Attention block by block, with a running softmax.

All tokens of a step go through the columns of the block table together: column j holds positions
[j · B, (j + 1) · B) of every request. A token keeps the greatest score so far, the sum of exponentials relative to
it, and the weighted sum of values; a column that raises the greatest score scales both sums down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.core.interfaces import AttentionBatch, AttentionLayer, AttentionSpec, CacheSpec, KVCacheGroup

__all__ = ["BlockwiseAttention"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Step:
    """What layers need of one step: N tokens, each with its own row of the block table."""

    positions: torch.Tensor
    """[N] int64."""
    table: torch.Tensor
    """[N, max_blocks] int64."""
    slots: torch.Tensor
    """[N] int64."""
    max_seq_len: int


class BlockwiseAttention:
    """Cache: K and V as one tensor [2, num_blocks, B, K, D]."""

    name = "blockwise"
    row_invariant = False
    numerics = "float32, block by block"
    graph: Literal["never", "decode", "always"] = "never"

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        """Any head size and feature of causal layers, where K and V are kept in the type they come in."""
        reasons = []
        if device.split(":")[0] not in ("cpu", "cuda"):
            reasons.append(f"device {device} (runs on: cpu, cuda)")
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype {spec.dtype} (serves: {', '.join(DTYPES)})")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"KV dtype {spec.kv_dtype} (serves: the model's dtype, {spec.dtype})")
        if not spec.causal:
            reasons.append("layers that are not causal")
        return reasons

    def layout(self, spec: AttentionSpec) -> CacheSpec:
        """No padding, no scales."""
        values = 2 * spec.block_size * spec.num_kv_heads * spec.head_dim
        return CacheSpec(page_bytes=values * DTYPES[spec.kv_dtype].itemsize)

    def allocate(self, spec: AttentionSpec, num_blocks: int, device: str) -> torch.Tensor:
        """One layer's cache."""
        shape = (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return torch.empty(shape, dtype=DTYPES[spec.kv_dtype], device=device)

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Step:
        """Give every token its request's row of the block table."""
        counts = batch.query_start.diff().to(batch.block_table.device)
        return Step(
            positions=batch.positions.clone(),
            table=batch.block_table.long().repeat_interleave(counts, dim=0),
            slots=batch.slot_mapping.clone(),
            max_seq_len=batch.max_seq_len,
        )

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Any, md: Step) -> None:
        """Store k, v [N, K, D] at the step's slots."""
        for pages, values in zip(cache, (k, v), strict=True):
            pages.flatten(0, 1).index_copy_(0, md.slots, values)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Any,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend with q [N, H, D]; fill out [N, H, D] and, if given, lse [N, H]."""
        num_tokens, num_heads, head_dim = q.shape
        queries = q.float().reshape(num_tokens, layer.num_kv_heads, -1, head_dim) * layer.scale
        greatest = torch.full(queries.shape[:-1], -torch.inf, device=q.device)
        total = torch.zeros_like(greatest)
        weighted = torch.zeros_like(queries)
        if layer.sinks is not None:
            # A sink is a score that brings no value: the softmax starts with it.
            greatest = greatest.copy_(layer.sinks.view(layer.num_kv_heads, -1))
            total = torch.ones_like(total)

        block_size = cache.shape[2]
        for column in range(-(-md.max_seq_len // block_size)):
            keys = column * block_size + torch.arange(block_size, device=q.device)
            seen = keys <= md.positions[:, None]
            if layer.window is not None:
                seen &= keys > md.positions[:, None] - layer.window
            rows = seen.any(dim=1).nonzero().squeeze(1)
            if not rows.numel():
                continue
            seen = seen[rows]
            k, v = cache[:, md.table[rows, column]].float()
            scores = torch.einsum("nkgd,nbkd->nkgb", queries[rows], k)
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            # Slots out of sight may hold NaN: select, never multiply by zero.
            scores = torch.where(seen[:, None, None, :], scores, -torch.inf)
            v = torch.where(seen[:, :, None, None], v, 0)

            before = greatest[rows]
            now = torch.maximum(before, scores.amax(dim=-1))
            weights = torch.exp(scores - now[..., None])
            fade = torch.exp(before - now)
            greatest[rows] = now
            total[rows] = total[rows] * fade + weights.sum(dim=-1)
            weighted[rows] = weighted[rows] * fade[..., None] + torch.einsum("nkgb,nbkd->nkgd", weights, v)

        out.copy_((weighted / total[..., None]).view(num_tokens, num_heads, head_dim))
        if lse is not None:
            lse.copy_((greatest + total.log()).view(num_tokens, num_heads))
