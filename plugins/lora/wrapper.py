"""The worker's half: products of the model, with what the adapters of a step's rows add to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.core.interfaces import (
    Embedding,
    Linear,
    LinearWrapper,
    RunnerBatch,
    Segment,
    SummedProduct,
)
from headrace.core.interfaces.wrapping import WrapContext
from headrace.core.plan import NewRequest
from headrace.plugins.lora.adapter import RANKS, Adapter
from headrace.plugins.lora.modules import Product, Targets
from headrace.plugins.lora.ops import EXPAND, SHRINK
from headrace.plugins.lora.options import LORA, LoraSection
from headrace.plugins.lora.slots import NO_SLOT, RowPlan, Slots
from headrace.plugins.lora.store import AdapterStore

__all__ = ["LoraWrapper"]

Ops = Callable[[str], Callable[..., Any]]


class LoraWrapper(LinearWrapper):
    """Knows which adapter each row of a step has, and brings it there.

    A step in which no row has one runs the model as it is.
    """

    name = "lora"

    def __init__(self, context: WrapContext, section: LoraSection, store: AdapterStore) -> None:
        self._store = store
        self._targets = Targets()
        self.slots = Slots(section.max_loras, self._targets)
        self.most = -(-section.max_lora_rank // RANKS) * RANKS
        """Room for the ranks of a module."""
        max_rows = context.config.scheduler.max_num_batched_tokens
        self._step = RowPlan(section.max_loras, max_rows)
        self._head = RowPlan(section.max_loras, max_rows)
        self._rows: RowPlan | None = self._step
        """Of the next product; None: it is nobody's."""
        self._head_rows: Sequence[int] | None = None
        """Of the step, that the output projection gets next."""
        self._embeds = False
        """Whether the next lookup is the step's."""
        self._slot_of_row = np.empty(0, dtype=np.int64)
        self._adapters: dict[str, Adapter] = {}
        """By request."""
        store.serve(
            self._targets,
            getattr(torch, context.dtype),
            max_rank=section.max_lora_rank,
            capacity=section.max_cpu_loras,
        )

    # The model is built ------------------------------------------------------------------------------

    def wrap(
        self,
        op: Ops,
        names: Sequence[str],
        out_features: Sequence[int],
        product: SummedProduct,
        in_features: int,
    ) -> SummedProduct:
        """Put what adapters add around a product."""
        known = self._targets.add(names, out_features, in_features, product.segments)
        return _WrappedProduct(self, product, _Addition(op, known, self.slots, self.most))

    def wrap_embedding(self, op: Ops, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        """Put what adapters add around a lookup."""
        vocab, size = shape
        known = self._targets.add([name], [size], vocab, [Segment(0, size, 0)], is_embedding=True)
        return _WrappedLookup(self, lookup, op(EXPAND), known)

    def wrap_head(self, op: Ops, name: str, head: Linear) -> Linear:
        """Put what adapters add around the output projection."""
        out = head.out_features
        known = self._targets.add([name], [out], head.in_features, [Segment(0, out, 0)])
        return _WrappedHead(self, head, _Addition(op, known, self.slots, self.most), known)

    # Steps -------------------------------------------------------------------------------------------

    def on_add(self, request: NewRequest) -> None:
        """Take hold of its adapter, which the core's half has loaded; a process without that half loads it here."""
        ref = request.stash.get(LORA)
        if ref is not None:
            self._adapters[request.request_id] = self._store.hold(ref)

    def on_remove(self, request_id: str) -> None:
        """Let go of its adapter."""
        adapter = self._adapters.pop(request_id, None)
        if adapter is not None:
            self._store.release(adapter.digest)
            self.slots.drop_unused({held.digest for held in self._adapters.values()})

    def on_batch(self, batch: RunnerBatch) -> None:
        """Bring the step's adapters into slots, and note which row has which."""
        found = [self._adapters.get(row.request_id) for row in batch.rows] if self._adapters else []
        own = [adapter for adapter in found if adapter is not None]
        self.active = bool(own)
        if not own:
            return
        slots = self.slots.place(own)
        each = [NO_SLOT if adapter is None else slots[adapter.digest] for adapter in found]
        self._slot_of_row = np.repeat(np.array(each), [row.count for row in batch.rows])
        self._step.fill(self._slot_of_row)
        self._rows, self._embeds = self._step, True

    def on_head_rows(self, rows: Sequence[int]) -> None:
        """Note which rows of the step the output projection gets; products behind it are nobody's."""
        if self.active:
            self._head_rows, self._rows = rows, None

    def take_rows(self) -> RowPlan | None:
        """Return whose rows the next product gets."""
        return self._rows if self.active else None

    def take_head(self, product: Product) -> RowPlan | None:
        """Return whose rows the output projection gets, once; None where it is as it is for all of them."""
        rows, self._head_rows = self._head_rows, None
        if rows is None or not self.slots.adapt(product):
            return None
        self._head.fill(self._slot_of_row[list(rows)])
        return self._head

    def take_lookup(self) -> RowPlan | None:
        """Return whose rows the next lookup gets: the step's once, then nobody's."""
        rows = self._step if self.active and self._embeds else None
        self._embeds = False
        return rows


class _Addition:
    """What the adapters of some rows add to the sums of one product."""

    def __init__(self, op: Ops, product: Product, slots: Slots, most: int) -> None:
        self._shrink = op(SHRINK)
        self._expand = op(EXPAND)
        self._product = product
        self._slots = slots
        self._most = most

    def sums(
        self, x: torch.Tensor, rows: RowPlan, inner: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the sums that `inner` makes of x, with the additions."""
        h = self._shrink(x, self._most, self._product, self._slots, rows)
        sums = inner(x)
        self._expand(h, sums, self._most, self._product, self._slots, rows, x.dtype)
        return sums


class _WrappedProduct:
    """A `SummedProduct` whose sums hold what adapters add."""

    def __init__(self, owner: LoraWrapper, inner: SummedProduct, addition: _Addition) -> None:
        self.segments = inner.segments
        self.finish = inner.finish
        self._owner = owner
        self._inner = inner
        self._addition = addition

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        rows = self._owner.take_rows()
        if rows is None:
            return self._inner(x)
        return self._inner.finish(self._addition.sums(x, rows, self._inner.sums), x.dtype)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, S] float32."""
        rows = self._owner.take_rows()
        return self._inner.sums(x) if rows is None else self._addition.sums(x, rows, self._inner.sums)


class _WrappedHead:
    """An output projection with what adapters add; it runs outside of recorded passes."""

    def __init__(self, owner: LoraWrapper, inner: Linear, addition: _Addition, product: Product) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._owner = owner
        self._inner = inner
        self._addition = addition
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        rows = self._owner.take_head(self._product)
        return self._inner(x) if rows is None else self._addition.sums(x, rows, self._inner)


class _WrappedLookup:
    """A lookup with what adapters add; it runs outside of recorded passes."""

    def __init__(
        self, owner: LoraWrapper, inner: Embedding, expand: Callable[..., None], product: Product
    ) -> None:
        self._owner = owner
        self._inner = inner
        self._expand = expand
        self._product = product

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        rows, x = self._owner.take_lookup(), self._inner(ids)
        slots = self._owner.slots
        if rows is None or not slots.adapt(self._product):
            return x
        h = torch.zeros(len(ids), self._owner.most, device=x.device)
        for slot, adapter in enumerate(slots.held):
            packed = adapter.products.get(self._product.index) if adapter is not None else None
            if packed is not None and packed.a[0] is not None:
                own = rows.of_slot(slot)
                h[own, : packed.ranks[0]] = packed.a[0][ids[own]].float()
        sums = x.float()
        self._expand(h, sums, self._owner.most, self._product, slots, rows, x.dtype)
        return sums.to(x.dtype)
