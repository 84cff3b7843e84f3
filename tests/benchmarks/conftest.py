"""Scripts of `benchmarks/`, which is no package: imported by name, as they import each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDERS = (BENCHMARKS, BENCHMARKS / "peers", BENCHMARKS / "serving")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script of `benchmarks/` or of a folder in it."""
    before = set(sys.modules)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if any(str(folder) in (getattr(sys.modules[name], "__file__", None) or "") for folder in FOLDERS):
            del sys.modules[name]


@pytest.fixture
def benchmarks() -> Path:
    return BENCHMARKS
