"""A rehearsal without weights: the model runs once on the meta device, to see which attention it asks for.

What a layer's attention is (sizes, scale, window, cap, sinks) is stated nowhere in a common form but in the call it
makes to the attention interface, and in the mask it was given. So both are written down here, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.core.errors import CheckpointError
from headrace.models.bridge.calls import CallFacts, Courier, attention_call, read_call
from headrace.models.bridge.head import OutputHead
from headrace.models.bridge.masks import OTHER, Sight, sight_of

__all__ = ["ProbedLayer", "ProbedModel", "probe_model"]

_PROBE = "headrace_probe"
_TOKENS = 3


@dataclass(frozen=True)
class ProbedLayer:
    """One attention layer."""

    name: str
    """The module's name in the model."""
    facts: CallFacts
    sight: int | None
    """The window that the mask keeps; None: every earlier token is seen."""
    sinks_name: str | None
    """The parameter that joins the softmax's denominator."""


@dataclass(frozen=True)
class ProbedModel:
    """What the rehearsal showed."""

    layers: tuple[ProbedLayer, ...]
    passes_arguments: bool
    """Whether keyword arguments of the forward reach the attention."""
    products: frozenset[str]
    """`nn.Linear` modules used as plain products: called, and their weights touched by nobody else."""


class _Watched(nn.Linear):
    """A product that notices who reads its weights."""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self.__dict__["read"] = True
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["used"] = True
        weight: Any = self._parameters["weight"]
        return nn.functional.linear(x, weight, self._parameters["bias"])


class _Recorder:
    """Takes the place of attention and masks during the rehearsal."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._length = length
        self._masks: list[tuple[torch.Tensor, Sight]] = []
        self.layers: dict[str, ProbedLayer] = {}
        self.passed = 0
        """Calls that came by way of the keyword arguments."""

    def mask(self, *, mask_function: Callable[..., Any]) -> torch.Tensor:
        """Return a tensor that stands for a mask, and keep what it shows."""
        stand_in = torch.empty((1, 1, _TOKENS, _TOKENS), dtype=torch.bool, device="meta")
        self._masks.append((stand_in, sight_of(mask_function, self._length)))
        return stand_in

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Write the call down; return a tensor of the right shape."""
        name = self._names[module]
        if name in self.layers:
            raise CheckpointError(f"{name} attends twice in one pass; its KV would have two owners")
        facts = read_call(name, q, k, v, arguments)
        sinks = self._parameters.get(id(arguments.get("s_aux")))
        if facts.sinks and sinks is None:
            raise CheckpointError(f"{name} passes sinks (s_aux) that are no parameter of it")
        self.layers[name] = ProbedLayer(name, facts, self._sight(name, mask, facts), sinks)
        return torch.empty((1, q.shape[2], q.shape[1], q.shape[3]), dtype=q.dtype, device="meta"), None

    def attend_passed(self, *tensors: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
        """Do the same, by way of the keyword arguments."""
        self.passed += 1
        return self.attend(*tensors, **arguments)

    def _sight(self, name: str, mask: torch.Tensor | None, facts: CallFacts) -> int | None:
        found = [sight for stand_in, sight in self._masks if stand_in is mask]
        if not found:
            raise CheckpointError(f"{name} makes its mask by itself, so what it sees is not known")
        sight = found[0]
        if sight == OTHER or isinstance(sight, str):
            raise CheckpointError(
                f"{name} sees neither all earlier tokens nor a window of them (chunks, blocks or both directions)"
            )
        passed = None if facts.window is None or facts.window >= self._length else facts.window
        if passed is not None and passed != sight:
            raise CheckpointError(f"{name} passes a window of {passed} tokens, its mask has {sight}")
        return sight


def probe_model(cls: Any, config: Any, length: int) -> ProbedModel:
    """Build and run `cls` without weights, for sequences up to `length` tokens.

    Raises `CheckpointError` naming the architecture and why it cannot run here.
    """
    try:
        return _probe(cls, config, length)
    except CheckpointError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot run through transformers' attention interface: {error}"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError, ImportError) as error:
        raise CheckpointError(
            f"{cls.__name__} cannot run through transformers' attention interface: a trial run without weights "
            f"failed with {type(error).__name__}: {error}"
        ) from error


def _probe(cls: Any, config: Any, length: int) -> ProbedModel:
    from transformers import AttentionInterface, AttentionMaskInterface

    # These only pass on to the recorder, which rides in the call and in the configuration: nothing is shared.
    AttentionInterface.register(_PROBE, attention_call)
    AttentionMaskInterface.register(_PROBE, _pass_mask)
    with torch.device("meta"):
        model = cls._from_config(
            config, attn_implementation=_PROBE, experts_implementation="batched_mm", dtype=torch.float32
        ).eval()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Watched
    recorder = _Recorder(model, length)
    base = model.base_model
    if base is model:
        raise CheckpointError("it is not built as a decoder with a head")
    width = model.get_input_embeddings().weight.shape[1]
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        if own is not None:
            own.headrace_probe = recorder
    with torch.no_grad(), torch.device("meta"):
        inputs = {
            "inputs_embeds": torch.empty((1, _TOKENS, width)),
            "attention_mask": torch.ones((1, _TOKENS), dtype=torch.long),
            "position_ids": torch.arange(_TOKENS)[None],
            "use_cache": False,
        }
        waiting = Courier(model.modules(), passed_down=False)
        hidden = waiting.run(base, recorder.attend, **inputs, headrace_call=recorder.attend_passed)
        OutputHead(model)(hidden.last_hidden_state[0])
    _check_count(recorder, config)
    watched = {name: module for name, module in model.named_modules() if isinstance(module, _Watched)}
    products = [name for name, m in watched.items() if m.__dict__.get("used") and not m.__dict__.get("read")]
    passes = recorder.passed == len(recorder.layers)
    return ProbedModel(tuple(recorder.layers.values()), passes, frozenset(products))


def _check_count(recorder: _Recorder, config: Any) -> None:
    found, expected = len(recorder.layers), config.num_hidden_layers
    if found == 0:
        raise CheckpointError("none of its layers calls the interface")
    if found != expected:
        raise CheckpointError(
            f"{found} of its {expected} layers call it; the others mix tokens in a way of their own"
        )


def _pass_mask(*, config: Any, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
    recorder: _Recorder = config.headrace_probe
    return recorder.mask(mask_function=mask_function)
