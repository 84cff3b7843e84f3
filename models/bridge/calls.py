"""A layer's call to transformers' attention interface: what it says, and how it reaches this step's context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.core.errors import CheckpointError

__all__ = ["CallFacts", "Courier", "attention_call", "read_call"]

_SLOT = "headrace_call"
_KNOWN = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {"is_causal", "position_ids", "use_cache", "cache_position", "headrace_call", "return_dict"}
)
"""Arguments of a call that say nothing our attention has to heed."""


@dataclass(frozen=True)
class CallFacts:
    """What a layer's call says besides tensors; it must say the same at every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    """As passed, which is not always what the mask did."""
    soft_cap: float | None
    sinks: bool


def read_call(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Mapping[str, Any]
) -> CallFacts:
    """Return the facts of a call with q [1, H, N, D], k and v [1, K, N, D].

    Raises `CheckpointError` for arguments our attention does not know.
    """
    strange = [
        key
        for key, value in arguments.items()
        if value is not None and value is not False and key not in _KNOWN and key not in _HARMLESS
    ]
    if strange:
        raise CheckpointError(f"{name} passes {', '.join(strange)} to its attention, which is not supported")
    if arguments.get("dropout"):
        raise CheckpointError(f"{name} uses dropout, which is for training")
    if q.shape[-1] != k.shape[-1] or k.shape != v.shape:
        raise CheckpointError(
            f"{name} has heads of different sizes: queries {q.shape[-1]}, keys {k.shape[-1]}, values {v.shape[-1]}; "
            "they must be equal"
        )
    scale = arguments.get("scaling")
    window, cap = arguments.get("sliding_window"), arguments.get("softcap")
    return CallFacts(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[-1],
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        window=None if window is None else int(window),
        soft_cap=None if cap is None else float(cap),
        sinks=arguments.get("s_aux") is not None,
    )


class Courier:
    """Brings each call of a model's layers to whoever runs the forward.

    He rides in the forward's keyword arguments where the model passes them down to its attention, and else waits at
    the attention modules of this one model while the forward runs; nothing is shared between models.
    """

    def __init__(self, modules: Iterable[nn.Module], *, passed_down: bool) -> None:
        self._waiting = () if passed_down else tuple(modules)

    def run(self, decoder: Callable[..., Any], call: Callable[..., Any], **inputs: Any) -> Any:
        """Return what `decoder` does, with `call(module, q, k, v, mask, **arguments)` for each attention."""
        for module in self._waiting:
            module.__dict__[_SLOT] = call
        try:
            more = {} if self._waiting else {"headrace_call": call}
            return decoder(**inputs, **more)
        finally:
            for module in self._waiting:
                del module.__dict__[_SLOT]


def attention_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    headrace_call: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Any:
    """Hand a call to the one who waits for it; this is what transformers knows as our attention."""
    call = headrace_call or module.__dict__[_SLOT]
    return call(module, query, key, value, attention_mask, **arguments)
