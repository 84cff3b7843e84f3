"""The package's own kernels, loaded: C functions by name and type, with their signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headrace.backends.cpu.build import build_package_kernels, load_kernels
from headrace.backends.cpu.isa import Tier

__all__ = ["DTYPES", "Functions", "Kernel", "KernelLibrary", "Kernels", "pointer"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Types that kernels compute in, by name."""

Functions = dict[torch.dtype, Callable[..., None]]
"""One kernel, by the type it computes in."""

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_LETTERS = {"P": ctypes.c_void_p, "I": ctypes.c_int64, "R": ctypes.c_int64, "F": ctypes.c_float}
_SIGNATURES = {
    "pack": "PIIIP",
    "rows": "PIPIIP",
    "linear": "PRIPIIPPI",
    "logits": "PRIPIIPPI",
    "linear_silu": "PRIPIIPPI",
    "linear_gelu": "PRIPIIPPI",
    "pack_grouped": "PIPP",
    "grouped": "PRIPPPIPPI",
    "grouped_logits": "PRIPPPIPPI",
    "grouped_silu": "PRIPPPIPPI",
    "grouped_gelu": "PRIPPPIPPI",
    "group_sums": "PRIIIP",
    "columns": "PRIPIP",
    "pack_whole": "PIIIPP",
    "round_rows": "PRIIIPP",
    "whole": "PRIPPIPPPPI",
    "whole_logits": "PRIPPIPPPPI",
    "whole_silu": "PRIPPIPPPPI",
    "whole_gelu": "PRIPPIPPPPI",
    "whole_rows": "PIPPIIP",
    "grouped_rows": "PIPPIP",
    "rms_norm": "PIPFRIIP",
    "add_rms_norm": "PPPFRIPP",
    "silu_mul": "PRIP",
    "gelu_mul": "PRIP",
    "narrow": "PRIP",
    "silu_sums": "PRIIP",
    "gelu_sums": "PRIIP",
    "add": "PPRIP",
    "scale": "PFRIP",
    "rotary": "PPRIIIPI",
    "kv_write": "PPPIPIIII",
    "attention": "PPPIPPIIIIIFFPI",
    "kv_write_int8": "PPPIPIIII",
    "attention_int8": "PPPIPPIIIIIFFPI",
    "draw": "PIIPPPPPPP",
    "score": "PIIPIPPP",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of one type."""

    name: str
    signature: str
    by_words: int
    """Address of the function that takes its arguments as words."""


class KernelLibrary:
    """Kernels of a shared object that `build_kernels` made; they can be recorded (`HR_KERNEL` in words.h).

    Its functions let go of Python's lock, and take addresses and element counts.

    signatures: a letter an argument, by the kernel's name. P: address, I: whole number, R: the number of rows of a
        step, F: float.
    """

    def __init__(self, path: Path, signatures: Mapping[str, str]) -> None:
        self.numerics = path.parent.name
        """Tier, and hashes of sources and compiler."""
        self._signatures = signatures
        self._library = load_kernels(path)
        self._given: list[tuple[str, Functions]] = []

    def by_type(self, name: str) -> Functions:
        """Return a kernel for each type it computes in."""
        found: Functions = {
            dtype: self._function(name, f"hr_{name}_{suffix}") for dtype, suffix in _SUFFIXES.items()
        }
        self._given.append((name, found))
        return found

    def by_name(self, name: str) -> Callable[..., None]:
        """Return a kernel that is there for one type only; it has no part in recorded passes."""
        return self._function(name, f"hr_{name}")

    def _function(self, name: str, symbol: str) -> Callable[..., None]:
        prototype = ctypes.CFUNCTYPE(None, *(_LETTERS[letter] for letter in self._signatures[name]))
        return prototype(self._address(symbol))

    def _address(self, name: str) -> int:
        """Return the address that a pointer of the shared object holds; see `HR_KERNEL` in words.h."""
        return ctypes.c_void_p.in_dll(self._library, name).value or 0

    @contextmanager
    def instead(self, note: Callable[..., None]) -> Iterator[None]:
        """Within it, kernels given out by `by_type` do not run: each call is `note(kernel, *arguments)`."""
        before = [dict(functions) for _, functions in self._given]
        try:
            for name, functions in self._given:
                for dtype, suffix in _SUFFIXES.items():
                    address = self._address(f"hr_{name}_{suffix}_words")
                    functions[dtype] = partial(note, Kernel(name, self._signatures[name], address))
            yield
        finally:
            for (_, functions), old in zip(self._given, before, strict=True):
                functions.update(old)


class Kernels(KernelLibrary):
    """The package's own kernels, for one tier."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(build_package_kernels(tier), _SIGNATURES)
        self.tier = tier
        self.replay: Callable[..., None] = self._library.hr_replay
        self._library.hr_replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._library.hr_replay.restype = None
        self.touch: Callable[..., None] = self._library.hr_touch
        self._library.hr_touch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._library.hr_touch.restype = None


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()
