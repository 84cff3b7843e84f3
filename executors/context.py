"""What a forward pass reaches besides its inputs: KV memory and this step's attention metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.core.interfaces import AttentionBackend, AttentionBatch, AttentionLayer, KVCacheLayout
from headrace.executors.loading import LoadedModel

__all__ = ["KVMemory", "StepContext"]


class KVMemory:
    """The pages of all layers: one cache a slot, shared by the layers of that slot in every group."""

    def __init__(self, loaded: LoadedModel, layout: KVCacheLayout, num_blocks: int) -> None:
        self._backend = loaded.backend
        self._groups = layout.groups
        self._places: dict[str, tuple[Any, int]] = {}
        for slot in range(layout.num_slots):
            members = [(i, g.layers[slot]) for i, g in enumerate(layout.groups) if slot < len(g.layers)]
            specs = [loaded.layers[name][1] for _, name in members]
            shapes = {(spec.num_kv_heads, spec.head_dim, spec.kv_dtype) for spec in specs}
            if len(shapes) > 1:
                raise ConfigError(
                    f"layers {[name for _, name in members]} share pages but store different shapes (KV heads, head "
                    f"size, type): {sorted(shapes)}"
                )
            cache = self._backend.allocate(
                specs[0], num_blocks + 1, loaded.device
            )  # block 0 is the null block
            for group, name in members:
                self._places[name] = (cache, group)

    @property
    def num_groups(self) -> int:
        """KV groups, each with a batch of its own in a step."""
        return len(self._groups)

    def step(self, batches: Sequence[AttentionBatch], into: StepContext | None = None) -> StepContext:
        """Prepare a step: metadata once a group; `into`: overwrite an earlier step, which a recording reads."""
        earlier = [None] * len(self._groups) if into is None else into.metadata
        metadata = [
            self._backend.prepare(group, batch) if old is None else self._backend.prepare(group, batch, old)
            for group, batch, old in zip(self._groups, batches, earlier, strict=True)
        ]
        return StepContext(self._backend, self._places, metadata) if into is None else into


class StepContext:
    """Implements `ForwardContext` for one step."""

    def __init__(
        self, backend: AttentionBackend, places: Mapping[str, tuple[Any, int]], metadata: Sequence[Any]
    ) -> None:
        self._backend = backend
        self._places = places
        self.metadata = metadata

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v [N, K, D], attend with q [N, H, D]; return [N, H·D]."""
        cache, group = self._places[layer.name]
        metadata = self.metadata[group]
        out = q.new_empty(q.shape)
        self._backend.write(layer, k, v, cache, metadata)
        self._backend.forward(layer, q, cache, metadata, out)
        return out.view(q.shape[0], -1)
