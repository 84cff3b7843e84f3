"""Adapters in memory: loaded on a thread, the one least recently wanted forgotten first."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.core.errors import EngineError, RequestError
from headrace.plugins.lora.adapter import Adapter, pack_adapter
from headrace.plugins.lora.files import read_files
from headrace.plugins.lora.modules import Targets
from headrace.plugins.lora.options import AdapterRef

__all__ = ["AdapterStore"]

LOADER_NICENESS = 5
"""Steps come first. But the loader must get processors beside other programs, too: while it has Python's lock, steps
wait for it. Beside two busy processes the longest of steps of 23 ms took 150 ms with a niceness of 15, 70 with 5."""


class AdapterStore:
    """The adapters of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a future that is done already calls back at once
        self._kept: OrderedDict[str, Future[Adapter]] = OrderedDict()
        """By digest, the one least recently wanted first."""
        self._holders: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "headrace-lora", initializer=_stand_back)
        self._model: tuple[Targets, torch.dtype, int] | None = None
        self._capacity = 1
        self._wake: Callable[[], None] = _nobody

    def serve(self, targets: Targets, dtype: torch.dtype, *, max_rank: int, capacity: int) -> None:
        """Say what model adapters are for, and how many to keep; adapters are wanted once the model is built."""
        self._model = targets, dtype, max_rank
        self._capacity = capacity

    def call_when_loaded(self, wake: Callable[[], None]) -> None:
        """Have somebody called whenever a load has ended; on any thread."""
        self._wake = wake

    def load(self, path: Path) -> Future[Adapter]:
        """Read whatever version is in a folder now. The future raises `RequestError` naming what is wrong."""
        result: Future[Adapter] = self._thread.submit(self._read, path)
        result.add_done_callback(self._keep)
        return result

    def get(self, ref: AdapterRef) -> Future[Adapter]:
        """Return one version, loading it where it is not in memory; it counts as wanted now."""
        with self._lock:
            known = self._kept.get(ref.digest)
            if known is None:
                known = self._kept[ref.digest] = self._thread.submit(self._read_version, ref)
                known.add_done_callback(lambda done: self._forget_failed(ref.digest, done))
            self._kept.move_to_end(ref.digest)
            self._shrink()
            return known

    def hold(self, ref: AdapterRef) -> Adapter:
        """Return one version, waiting for it where it is not in memory; it stays until as many `release` it."""
        adapter = self.get(ref).result()
        with self._lock:
            self._holders[ref.digest] += 1
        return adapter

    def release(self, digest: str) -> None:
        """End a `hold`."""
        with self._lock:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
            self._shrink()

    @property
    def num_kept(self) -> int:
        """Adapters in memory, those being loaded included."""
        return len(self._kept)

    def _read(self, path: Path) -> Adapter:
        if self._model is None:
            raise EngineError("an adapter was asked for before the model was built")
        targets, dtype, max_rank = self._model
        files = read_files(path)
        with torch.inference_mode():
            return pack_adapter(files, targets, dtype, max_rank)

    def _read_version(self, ref: AdapterRef) -> Adapter:
        adapter = self._read(Path(ref.path))
        if adapter.digest != ref.digest:
            raise RequestError(
                f"lora: the files of adapter {ref.name!r} in {ref.path} changed after it was loaded; load it again",
                param="lora",
            )
        return adapter

    def _keep(self, done: Future[Adapter]) -> None:
        if done.exception() is None:
            with self._lock:
                self._kept[done.result().digest] = done
                self._kept.move_to_end(done.result().digest)
                self._shrink()
        self._wake()

    def _forget_failed(self, digest: str, done: Future[Adapter]) -> None:
        """A load that failed is tried again by the next who asks; who waits for it has the future."""
        if done.exception() is not None:
            with self._lock:
                if self._kept.get(digest) is done:
                    del self._kept[digest]
        self._wake()

    def _shrink(self) -> None:
        """Forget what nobody holds, as far as there are too many."""
        excess = len(self._kept) - self._capacity
        if excess > 0:
            unheld = [digest for digest in self._kept if digest not in self._holders]
            for digest in unheld[:excess]:
                del self._kept[digest]


def _stand_back() -> None:
    """Let this thread run when compute threads leave a processor: a load is to be felt by nobody."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADER_NICENESS)


def _nobody() -> None:
    """Stands where nobody wants to be called."""
