"""Progress bars on standard error, for somebody who looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from headrace.core.interfaces.checkpoint import Progress

__all__ = ["counting", "download_progress"]


@contextmanager
def download_progress() -> Iterator[Progress]:
    """Yield a callback that draws a bar on standard error, from its first call on; on no terminal, it is one line."""
    bars: dict[str, tqdm[Any]] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(
                total=total or None, desc=what, unit="B", unit_scale=True, dynamic_ncols=True, disable=None
            )
            if bars[what].disable:
                sys.stderr.write(f"{what}\n")
        bar = bars[what]
        if total and bar.total != total:
            bar.total = total
        # What is there may shrink when files are moved; a bar does not go back.
        bar.update(max(0, done - bar.n))

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Yield what is called after each of `total` things; there is no bar where standard error is no terminal."""
    with tqdm(total=total, desc=what, dynamic_ncols=True, disable=None) as bar:

        def tick() -> None:
            bar.update()

        yield tick
