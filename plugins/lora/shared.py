"""The store of adapters that core half and worker half of one process share. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.plugins.lora.store import AdapterStore

__all__ = ["SharedStore"]


class SharedStore:
    """One store where both halves live together; where they do not, each process has its own."""

    def __init__(self) -> None:
        self._store: AdapterStore | None = None

    def get(self) -> AdapterStore:
        """Return it; the first who asks makes it. Called while an engine is put together, on one thread."""
        if self._store is None:
            from headrace.plugins.lora.store import AdapterStore

            self._store = AdapterStore()
        return self._store
