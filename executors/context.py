"""What a forward pass reaches besides its inputs: KV memory and this step's attention metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.core.interfaces import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    KVCacheGroup,
    KVCacheLayout,
)
from headrace.executors.loading import LoadedModel

__all__ = ["KVMemory", "StepContext"]


class KVMemory:
    """The pages of a model's layers: in each slot one cache for all layers of a shape, of whichever group.

    Groups of the layout that hold none of the model's layers (a proposer's, say) are passed over.
    """

    def __init__(self, loaded: LoadedModel, layout: KVCacheLayout, num_blocks: int) -> None:
        self._backend = loaded.backend
        self._places: dict[str, tuple[Any, int]] = {}
        self.group_indices: list[int] = []
        """In the layout, of the groups it serves; a step has a batch for each of these."""
        self._groups: list[KVCacheGroup] = []
        caches: dict[tuple[Any, ...], Any] = {}
        for index, group in enumerate(layout.groups):
            own = [(slot, name) for slot, name in enumerate(group.layers) if name in loaded.layers]
            if not own:
                continue
            for slot, name in own:
                spec = loaded.layers[name][1]
                key = slot, spec.num_kv_heads, spec.head_dim, spec.kv_dtype
                if key not in caches:
                    # Block 0 is the null block.
                    caches[key] = self._backend.allocate(spec, num_blocks + 1, loaded.device)
                self._places[name] = (caches[key], len(self._groups))
            self._groups.append(group)
            self.group_indices.append(index)

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
