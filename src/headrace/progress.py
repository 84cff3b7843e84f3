"""A progress bar for what takes long before an engine answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from headrace.core.interfaces.checkpoint import Progress

__all__ = ["download_progress"]


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
