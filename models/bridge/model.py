"""A model of transformers that runs on the engine's KV memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import AttentionLayer, ForwardContext, ModelBuild
from headrace.models.bridge.calls import CallFacts, Courier, read_call
from headrace.models.bridge.head import OutputHead
from headrace.models.bridge.parts import empty_model, fill
from headrace.models.bridge.probe import ProbedModel

__all__ = ["BridgeModel"]


@dataclasses.dataclass(frozen=True)
class _Handle:
    """A layer as declared, and what its calls must say."""

    layer: AttentionLayer
    facts: CallFacts


class BridgeModel:
    """A built model: the requests of a step go through as one row of tokens, each with its own position."""

    def __init__(self, build: ModelBuild, cls: Any, config: Any, probed: ProbedModel) -> None:
        model: Any = empty_model(cls, config, build.dtype, build.device)
        fill(build, model, probed.products, [layer.name for layer in probed.layers])
        self._base: Any = model.base_model
        self._embedding: Any = model.get_input_embeddings()
        self._head = OutputHead(model)
        self._handles = _declare(build, model, probed)
        self._courier = Courier(self._handles, passed_down=probed.passes_arguments)
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(self._embedding.weight.shape[1])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        x: torch.Tensor = self._embedding(ids)
        return x

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """X [N, C], positions [N] -> ([N, C] after the last norm, no taps)."""
        call = partial(self._attend, ctx)
        out = self._courier.run(
            self._base, call, inputs_embeds=x[None], position_ids=positions[None], use_cache=False
        )
        return out.last_hidden_state[0], {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        return self._head(hidden).float()

    def _attend(
        self,
        ctx: ForwardContext,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Q [1, H, N, D], k and v [1, K, N, D] -> [1, N, H, D]."""
        handle = self._handles[module]
        facts = read_call(handle.layer.name, q, k, v, arguments)
        if facts != handle.facts or mask is not None:
            raise CheckpointError(
                f"{handle.layer.name} asks for another attention than when the model was built: {facts} with "
                f"{'a' if mask is not None else 'no'} mask, not {handle.facts}"
            )
        q, k, v = (one[0].transpose(0, 1).contiguous() for one in (q, k, v))
        out = ctx.attend(handle.layer, q, k, v)
        return out.view(1, *q.shape), None


def _declare(build: ModelBuild, model: nn.Module, probed: ProbedModel) -> dict[nn.Module, _Handle]:
    handles = {}
    for one in probed.layers:
        facts = one.facts
        spec = build.attention_spec(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            window=one.sight,
            soft_cap=facts.soft_cap,
            sinks=facts.sinks,
        )
        layer = build.attention(one.name, spec, scale=facts.scale)
        if one.sinks_name is not None:
            layer = dataclasses.replace(layer, sinks=model.get_parameter(one.sinks_name).detach().float())
        handles[model.get_submodule(one.name)] = _Handle(layer, facts)
    return handles
