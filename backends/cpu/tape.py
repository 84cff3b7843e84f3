"""Recorded passes: kernels and their arguments, noted once, called one after the other by one C function.

While a pass is recorded no kernel runs. torch may make tensors, which then come from a pool that the tape keeps, and
views of them; anything else it is asked to compute would be missing in the recording, so the pass is refused.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from headrace.backends.cpu.library import Kernel, KernelLibrary
from headrace.core.interfaces.graph import RecordError

__all__ = ["Tape", "TapeRecorder"]

Result = TypeVar("Result")

_ALIGNMENT = 64
_READS = frozenset({"__get__", "__len__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"})
"""Of torch's functions those that read what a tensor is."""
_VIEWS = frozenset(
    {"view", "split", "chunk", "narrow", "select", "transpose", "unbind", "unsqueeze", "squeeze"}
)
"""Those that look at a tensor in another shape."""
_MAKES = frozenset({"empty", "new_empty", "empty_like"})


class _Entry(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_void_p), ("words", ctypes.c_void_p), ("rows", ctypes.c_int64))


class _Word(ctypes.Union):
    _fields_ = (("number", ctypes.c_int64), ("address", ctypes.c_void_p), ("real", ctypes.c_float))


class Tape:
    """A recorded pass. It keeps all that its kernels read and write."""

    def __init__(self, replay: Callable[..., None], calls: Sequence[_Entry], kept: Sequence[object]) -> None:
        self._replay = replay
        self._entries = (_Entry * len(calls))(*calls)
        self._kept = kept

    def __len__(self) -> int:
        return len(self._entries)

    def replay(self, num_rows: int) -> None:
        """Call the kernels in order, over `num_rows` rows."""
        self._replay(self._entries, len(self._entries), num_rows)


class TapeRecorder:
    """Implements `GraphRecorder`.

    Parameters
    ----------
    replay: the C function that calls recorded kernels.
    kernels: of everybody whose calls are to be recorded.
    """

    def __init__(self, replay: Callable[..., None], *kernels: KernelLibrary) -> None:
        self._replay = replay
        self._kernels = kernels

    def including(self, parts: Sequence[Any]) -> TapeRecorder:
        """Return one that notes calls of these kernels, too. Raises `RecordError` for what is no `KernelLibrary`."""
        for part in parts:
            if not isinstance(part, KernelLibrary):
                raise RecordError(f"{type(part).__name__} is no library of kernels that could be recorded")
        return TapeRecorder(self._replay, *self._kernels, *parts)

    def record(self, run: Callable[[], Result], num_rows: int) -> tuple[Tape, Result]:
        """Call `run` and note its kernels. Raises `RecordError` where torch is to compute something."""
        calls = _Calls(num_rows)
        pool = _Pool()
        with ExitStack() as recording:
            for kernels in self._kernels:
                recording.enter_context(kernels.instead(calls.note))
            recording.enter_context(_OnlyMemory(pool))
            result = run()
        return Tape(self._replay, calls.entries, (calls.words, pool)), result


class _Calls:
    """What was called."""

    def __init__(self, num_rows: int) -> None:
        self.entries: list[_Entry] = []
        self.words: list[Any] = []
        self._num_rows = num_rows

    def note(self, kernel: Kernel, *arguments: Any) -> None:
        words = (_Word * len(arguments))()
        rows = -1
        for i, (letter, value) in enumerate(zip(kernel.signature, arguments, strict=True)):
            if letter == "P":
                words[i].address = (
                    value if value is None or isinstance(value, int) else ctypes.addressof(value)
                )
            elif letter == "F":
                words[i].real = value
            else:
                words[i].number = value
            if letter == "R":
                if value != self._num_rows:
                    raise RecordError(f"{kernel.name} works on {value} rows of {self._num_rows}")
                rows = i
        self.words.append(words)
        self.entries.append(_Entry(kernel.by_words, ctypes.addressof(words), rows))


class _Pool:
    """Buffers that tensors of a recording lie in; one whose tensors are gone is used again."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor, not filled."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        buffer = self._free(size + _ALIGNMENT)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGNMENT
        return raw[start : start + size].view(dtype).view(list(shape))

    def _free(self, size: int) -> bytearray:
        # A tensor holds its buffer; two references are the list's and the count's own, a third the loop's.
        unused = [one for one in self._buffers if len(one) >= size and sys.getrefcount(one) <= 3]
        if unused:
            return min(unused, key=len)
        self._buffers.append(bytearray(size))
        return self._buffers[-1]


def _is_view(index: Any) -> bool:
    """Whether a tensor indexed so is looked at and not copied."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)


class _OnlyMemory(TorchFunctionMode):
    """Tensors are made in the pool and looked at; nothing is computed."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        if (
            name in _READS
            or name in _VIEWS
            or (name == "__getitem__" and _is_view(args[1]))
            or (name == "contiguous" and args[0].is_contiguous())
        ):
            return func(*args, **kwargs)
        if name in _MAKES:
            return self._made(name, args, kwargs)
        raise RecordError(f"torch computes {name}")

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        like, sizes = (None, args) if name == "empty" else (args[0], args[1:])
        if name == "empty_like":
            shape = args[0].shape
        else:
            shape = kwargs["size"] if "size" in kwargs else sizes if isinstance(sizes[0], int) else sizes[0]
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        return self._pool.empty(shape, dtype)
