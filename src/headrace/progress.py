"""A progress bar for what takes long before an engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from headrace.core.interfaces.checkpoint import Progress

__all__ = ["download_progress"]


@contextmanager
def download_progress() -> Iterator[Progress]:
    """Yield a callback that draws a bar on standard error, from its first call on."""
    bars: dict[str, tqdm[Any]] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)
        bar = bars[what]
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()
