"""From hidden states to logits, as the architecture's own class does it."""

from __future__ import annotations

import copy

import torch
from torch import nn

__all__ = ["OutputHead"]


class _Output:
    """A decoder's output: hidden states, and None for whatever else a class asks for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Stands where the decoder was: what goes in is its hidden states."""

    @property
    def decoder(self) -> _Given:
        """Itself: some classes reach for the decoder inside of their decoder."""
        return self

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Output:
        return _Output(inputs_embeds)


class OutputHead:
    """The class's forward with the decoder taken out, so that scales, caps and biases of logits are in.

    It shares modules with the model it is made of, which keeps its decoder.
    """

    def __init__(self, model: nn.Module) -> None:
        # A copy of the outermost module alone: its table of children is its own, the children are not.
        head = copy.copy(model)
        head._modules = dict(model._modules)
        prefix = str(model.base_model_prefix)
        if prefix not in head._modules:
            raise AttributeError(f"{type(model).__name__} keeps no decoder under {prefix!r}")
        head._modules[prefix] = _Given()
        self._head = head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V]."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]
