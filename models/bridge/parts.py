"""Fills a model's modules from a checkpoint: products through the build, everything else tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Linear, ModelBuild
from headrace.models.bridge.library import IMPLEMENTATION
from headrace.models.bridge.spelling import Spelling, take_pieces
from headrace.models.layers import set_aside, set_tied_aside

__all__ = ["empty_model", "fill"]


class _Product(nn.Module):
    """One of the engine's products where an `nn.Linear` was."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = self._linear(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def move(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # as it was
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = nn.modules.module.register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def empty_model(cls: Any, config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """Build `cls` with its buffers computed on `device` and no memory for its parameters."""
    from transformers import AttentionInterface

    from headrace.models.bridge.calls import attention_call

    AttentionInterface.register(IMPLEMENTATION, attention_call)
    with _parameters_on_meta(), torch.device(device):
        model: Any = cls._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    built: nn.Module = model.eval()
    return built


def fill(build: ModelBuild, model: Any, products: frozenset[str], attentions: list[str]) -> None:
    """Take every tensor of `model` from the build's weights.

    products: names of `nn.Linear` modules that become the build's; attentions: names of attention modules.
    Raises `CheckpointError` for tensors that are missing or have another shape.
    """
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    spelling = Spelling(build.weights, model, shapes)
    products = frozenset(name for name in products if spelling.is_whole(f"{name}.weight"))
    # Either of the two names may be the one that was saved.
    origin = {a: b for b, a in tied.items() if not spelling.has(a) and spelling.has(b)}
    wanted = {n: s for n, s in shapes.items() if n not in tied and n.rpartition(".")[0] not in products}
    cut = {name: s for name, s in wanted.items() if not spelling.is_whole(name)}
    filled = {
        name: _take(build, spelling.of(origin.get(name, name)), s)
        for name, s in wanted.items()
        if name not in cut
    }
    filled |= take_pieces(build, model, cut)
    heads = _products(build, model, products, tied, spelling, origin, filled)
    for name in shapes:
        owner, _, leaf = name.rpartition(".")
        if owner in heads:
            continue
        value = filled.get(tied.get(name, name))
        if value is None:
            raise CheckpointError(
                f"the tensor {name!r} is to be that of {tied.get(name)!r}, which is a product's"
            )
        if name in tied:
            set_tied_aside(build, spelling.of(name), spelling.of(tied[name]), value)
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    for name, product in heads.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, product)
    _fill_buffers(build, model, spelling)
    _set_old_buffers_aside(build, model, spelling, attentions)


def _take(build: ModelBuild, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return build.weights.take(name, shape).to(build.device)


def _products(
    build: ModelBuild,
    model: nn.Module,
    names: frozenset[str],
    tied: dict[str, str],
    spelling: Spelling,
    origin: dict[str, str],
    filled: dict[str, torch.Tensor],
) -> dict[str, _Product]:
    products = {}
    for name in sorted(names):
        module: Any = model.get_submodule(name)
        weight = f"{name}.weight"
        if weight not in tied:
            linear = build.linear(
                spelling.of(weight).removesuffix(".weight"),
                in_features=module.in_features,
                out_features=(module.out_features,),
                bias=module.bias is not None,
            )
        else:
            twin = tied[weight]
            set_tied_aside(build, spelling.of(weight), spelling.of(twin), filled[twin])
            vocab, hidden = filled[twin].shape
            _, linear = build.tied_embedding(
                spelling.of(origin.get(twin, twin)).removesuffix(".weight"), vocab, hidden
            )
            if module.bias is not None:
                bias = _take(build, spelling.of(f"{name}.bias"), (module.out_features,))
                linear = _Biased(linear, bias)
        products[name] = _Product(linear)
    return products


class _Biased:
    """A tied product with a bias."""

    def __init__(self, linear: Linear, bias: torch.Tensor) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear, self._bias = linear, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._linear(x) + self._bias


def _fill_buffers(build: ModelBuild, model: nn.Module, spelling: Spelling) -> None:
    """Buffers that a checkpoint carries; those that follow from the configuration stay as computed."""
    for owner_name, owner in model.named_modules():
        for leaf, buffer in owner._buffers.items():
            name = spelling.of(f"{owner_name}.{leaf}" if owner_name else leaf)
            if buffer is None or name not in build.weights:
                continue
            value = _take(build, name, tuple(buffer.shape))
            if leaf not in owner._non_persistent_buffers_set:
                owner._buffers[leaf] = value.to(buffer.dtype)


def _set_old_buffers_aside(build: ModelBuild, model: Any, spelling: Spelling, attentions: list[str]) -> None:
    """Causal masks that old versions of transformers saved with each attention."""
    length = getattr(model.config, "max_position_embeddings", 0)
    for name in attentions:
        module = model.get_submodule(name)
        for leaf, shape in (("bias", (1, 1, length, length)), ("masked_bias", ())):
            if leaf not in module._parameters and leaf not in module._buffers:
                set_aside(build, spelling.of(f"{name}.{leaf}"), shape)
