"""Where kernels find adapters and rows: arrays that keep their addresses, filled anew for each step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import EngineError
from headrace.plugins.lora.adapter import Adapter
from headrace.plugins.lora.modules import Product, Targets

__all__ = ["NO_SLOT", "RowPlan", "Slots"]

NO_SLOT = -1


class RowPlan:
    """Which rows have an adapter, sorted by slot.

    starts: int32 [slots + 1]; rows: int32. The rows of slot s are `rows[starts[s]:starts[s + 1]]`.
    """

    def __init__(self, num_slots: int, max_rows: int) -> None:
        self.starts = torch.zeros(num_slots + 1, dtype=torch.int32)
        self.rows = torch.zeros(max_rows, dtype=torch.int32)
        self._starts, self._rows = self.starts.numpy(), self.rows.numpy()

    def fill(self, slots: npt.NDArray[np.int64]) -> None:
        """Take in the slot of each row, or `NO_SLOT`."""
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots + 1, minlength=len(self._starts))
        np.cumsum(counts[1:], out=self._starts[1:])
        own = order[counts[0] :]
        self._rows[: len(own)] = own

    def of_slot(self, slot: int) -> torch.Tensor:
        """Return the rows of a slot, int64."""
        return self.rows[self._starts[slot] : self._starts[slot + 1]].long()


class Slots:
    """The adapters of a step.

    Putting one into a slot copies its line, a few thousand numbers; its matrices stay where they were loaded.
    """

    def __init__(self, num_slots: int, targets: Targets) -> None:
        self._targets = targets
        self._held: list[Adapter | None] = [None] * num_slots

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """[slots, line]; asked for once the model is built, and then at one address."""
        return np.zeros((len(self._held), self._targets.line), dtype=np.int64)

    @property
    def held(self) -> Sequence[Adapter | None]:
        """The adapter in each slot."""
        return self._held

    def adapt(self, product: Product) -> bool:
        """Whether an adapter that is held adds to a product."""
        return any(adapter is not None and product.index in adapter.products for adapter in self._held)

    def place(self, adapters: Sequence[Adapter]) -> dict[str, int]:
        """Bring these adapters into slots, those that are there stay; return slots by digest."""
        wanted = {adapter.digest: adapter for adapter in adapters}
        if len(wanted) > len(self._held):
            raise EngineError(
                f"a step holds {len(wanted)} adapters, and there are {len(self._held)} slots (max_loras)"
            )
        found = {held.digest: slot for slot, held in enumerate(self._held) if held and held.digest in wanted}
        free = (slot for slot in range(len(self._held)) if slot not in found.values())
        for digest, adapter in wanted.items():
            if digest not in found:
                slot = next(free)
                self._held[slot] = adapter
                self.table[slot] = adapter.line
                found[digest] = slot
        return found

    def drop_unused(self, digests: set[str]) -> None:
        """Let go of adapters that no request here has any more, so that they can be freed."""
        for slot, held in enumerate(self._held):
            if held is not None and held.digest not in digests:
                self._held[slot] = None
                self.table[slot] = 0
