"""Which backend, which ops, which type to compute in: chosen once, with the reasons kept for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.core.interfaces import AttentionBackend, AttentionSpec, GraphRecorder, LinearFormat, Op, OpSet
from headrace.core.plugin.registry import Registry

__all__ = ["Ops", "choose_attention", "resolve_dtype", "torch_dtype"]

_DTYPES = ("float32", "float16", "bfloat16")


def resolve_dtype(requested: str, config: Mapping[str, Any]) -> str:
    """Return the name of the type to compute in: what was asked for, else the checkpoint's own.

    A checkpoint of mixed or packed types (GGUF) states none: bfloat16 where the processor computes it, else float32.
    """
    if requested != "auto":
        return requested
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated in _DTYPES:
        return str(stated)
    return "bfloat16" if _computes_bfloat16() else "float32"


def _computes_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return " avx512_bf16" in flags or " amx_bf16" in flags


def choose_attention(
    registry: Registry, name: str, specs: Sequence[AttentionSpec], device: str
) -> tuple[AttentionBackend, dict[str, list[str]]]:
    """Return the backend that serves all `specs`, and why others before it were not taken.

    `auto` takes the first registered that fits. Raises `ConfigError` with each backend's reasons.
    """
    entries = (
        registry.entries("attention_backend")
        if name == "auto"
        else [registry.get("attention_backend", name, option="attention_backend")]
    )
    refused: dict[str, list[str]] = {}
    for entry in entries:
        backend: AttentionBackend = entry.factory()
        reasons = [reason for spec in specs for reason in backend.why_not(spec, device)]
        if not reasons:
            return backend, refused
        refused[entry.name] = list(dict.fromkeys(reasons))
    told = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    raise ConfigError(
        f"no attention backend can serve this model on {device}. {told or 'None is registered'}. The option is "
        "attention_backend; for the KV dtype, kv_cache_dtype.",
        option="attention_backend",
    )


class Ops:
    """The op sets that fit the device, in order of registration: the first that has an op provides it."""

    def __init__(self, registry: Registry, device: str, dtype: str) -> None:
        self._sets: list[OpSet] = []
        self.refused: dict[str, list[str]] = {}
        self.used: list[tuple[str, str, bool]] = []
        """(op, op set, row-invariant) of each op handed out."""
        self._recorded: dict[str, Any] = {}
        """By op set: what another set's recorder needs to note its ops."""
        for entry in registry.entries("op_set"):
            ops: OpSet = entry.factory()
            reasons = ops.why_not(device, dtype)
            if reasons:
                self.refused[entry.name] = reasons
            else:
                self._sets.append(ops)

    @property
    def names(self) -> list[str]:
        """Sets that fit, first choice first."""
        return [ops.name for ops in self._sets]

    @property
    def names_used(self) -> list[str]:
        """Those of them whose ops were handed out."""
        return [ops.name for ops in self._sets if any(name == ops.name for _, name, _ in self.used)]

    @property
    def numerics(self) -> list[str]:
        """What decides the last bits of what the sets in use compute."""
        return [ops.numerics for ops in self._sets if any(name == ops.name for _, name, _ in self.used)]

    @property
    def linear_formats(self) -> dict[str, str]:
        """Which set runs each format of weights handed out."""
        found = {name: ops for name, ops, _ in self.used if name.startswith("linear:")}
        return {name.removeprefix("linear:"): ops for name, ops in found.items()}

    @property
    def row_invariant(self) -> bool:
        """Whether every op handed out so far is."""
        return all(invariant for _, _, invariant in self.used)

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return an op, or None where no set has it."""
        for ops in self._sets:
            op: Op | None = ops.get(name)
            if op is not None:
                self.used.append((name, ops.name, op.row_invariant))
                self._recorded[ops.name] = op.recorded
                return op.fn
        return None

    def get(self, name: str) -> Callable[..., Any]:
        """Return an op. Raises `ConfigError` where no set has it."""
        op = self.find(name)
        if op is not None:
            return op
        raise ConfigError(f"no op set has the op {name!r}; sets in use: {', '.join(self.names) or 'none'}")

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """Return what records passes over all ops handed out and `backend`; None where one of them is not recorded.

        An op of the torch reference is found out when it is recorded: it does not count here.
        """
        if backend.graph == "never":
            return None
        own = {name for _, name, _ in self.used} - {"torch"}
        for ops in self._sets:
            recorder = ops.recorder(backend) if ops.name in own else None
            if recorder is not None:
                others = [self._recorded.get(name) for name in sorted(own - {ops.name})]
                if None in others:
                    return None
                return recorder.including(others) if others else recorder
        return None

    def linear(self, format: str) -> LinearFormat:
        """Return how weights of `format` run. Raises `ConfigError` where no set knows it."""
        for ops in self._sets:
            found = ops.linear(format)
            if found is not None:
                self.used.append((f"linear:{format}", ops.name, found.row_invariant))
                return found
        raise ConfigError(
            f"no op set runs weights of the format {format!r}; sets in use: {', '.join(self.names) or 'none'}"
        )


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of this name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}", option="dtype")
    return dtype
