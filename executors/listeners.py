"""All runner listeners, told as one; what one raises comes out under its plugin's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.core.errors import PluginCallError
from headrace.core.interfaces import RunnerBatch, RunnerListener
from headrace.core.plan import NewRequest, StepResult

__all__ = ["RunnerListeners"]


class RunnerListeners:
    """Calls each listener that overrides a method, in order. Raises `PluginCallError`."""

    def __init__(self, listeners: Sequence[RunnerListener]) -> None:
        self.all = tuple(listeners)
        self._by_method = {
            method: [
                one for one in listeners if getattr(type(one), method) is not getattr(RunnerListener, method)
            ]
            for method in ("on_add", "on_remove", "on_batch", "on_embed", "on_hidden", "on_tokens")
        }

    @property
    def need_rows(self) -> bool:
        """Whether anybody looks at the rows of a step."""
        return any(self._by_method[method] for method in ("on_batch", "on_embed", "on_hidden", "on_tokens"))

    def on_add(self, request: NewRequest) -> None:
        """A request came."""
        for listener in self._by_method["on_add"]:
            _call(listener, "on_add", listener.on_add, request)

    def on_remove(self, request_id: str) -> None:
        """A request left."""
        for listener in self._by_method["on_remove"]:
            _call(listener, "on_remove", listener.on_remove, request_id)

    def on_batch(self, batch: RunnerBatch) -> None:
        """Before the forward pass."""
        for listener in self._by_method["on_batch"]:
            _call(listener, "on_batch", listener.on_batch, batch)

    def on_embed(self, batch: RunnerBatch, x: torch.Tensor) -> torch.Tensor:
        """After the embedding."""
        for listener in self._by_method["on_embed"]:
            x = _call(listener, "on_embed", listener.on_embed, batch, x)
        return x

    def on_hidden(self, batch: RunnerBatch, hidden: torch.Tensor) -> None:
        """After the forward pass."""
        for listener in self._by_method["on_hidden"]:
            _call(listener, "on_hidden", listener.on_hidden, batch, hidden)

    def on_tokens(self, batch: RunnerBatch, result: StepResult) -> None:
        """Tokens were drawn."""
        for listener in self._by_method["on_tokens"]:
            _call(listener, "on_tokens", listener.on_tokens, batch, result)


def _call(listener: RunnerListener, method: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # isolation point: the caller fails the request or the step by this name
        raise PluginCallError(
            f"runner listener {listener.name!r} failed in {method}: {type(error).__name__}: {error}",
            plugin=listener.name,
        ) from error
